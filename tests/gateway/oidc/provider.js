// A real OpenID Connect provider for tests, on loopback: whoever gives a name signs in under it.
// usage: node provider.js PORT REDIRECT_ADDRESS [SECRET]
import Provider from "oidc-provider";

const [port, redirect, secret] = process.argv.slice(2);
const groups = { anna: ["hpc-staff", "all"], ben: ["students"], carl: [] };
const client = {
  client_id: "fabric",
  application_type: "native", // whose address on loopback may have any port
  redirect_uris: [redirect],
  response_types: ["code"],
  grant_types: ["authorization_code"],
  token_endpoint_auth_method: secret ? "client_secret_basic" : "none",
};
const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [secret ? { ...client, client_secret: secret } : client],
  pkce: { required: () => true },
  scopes: ["openid", "profile", "groups"],
  claims: { openid: ["sub"], profile: ["preferred_username"], groups: ["groups"] },
  cookies: { keys: ["only-for-tests"] },
  findAccount: (_, id) => ({
    accountId: id,
    claims: () => ({ sub: id, preferred_username: id, groups: groups[id] ?? ["all"] }),
  }),
});
provider.listen(Number(port), "127.0.0.1", () => process.stdout.write("ready\n"));
