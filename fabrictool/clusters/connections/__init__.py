"""Ways to a login node, all behind one protocol: asyncssh, the system's OpenSSH, and Fabric for verbs that ask."""
