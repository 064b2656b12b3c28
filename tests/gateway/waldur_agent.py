"""The life of a resource, led by the real Waldur site agent's LiteLLM backends; says what came of it, as JSON.

``PYTHON tests/gateway/waldur_agent.py URL ADMIN-KEY``, with a Python that has waldur-site-agent-litellm.
"""

import json
import sys
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import httpx
from waldur_site_agent_litellm.backend import LiteLLMBackend
from waldur_site_agent_litellm.client import LiteLLMBackendError
from waldur_site_agent_litellm.reporting import LiteLLMUsageReportingBackend

RESOURCE = "6f9619ff8b86d011b42d00cf4fc964ff"


def resource(**limits):
    """What the backends read of one of Waldur's."""
    has = SimpleNamespace(to_dict=lambda: limits)
    return SimpleNamespace(uuid=SimpleNamespace(hex=RESOURCE), backend_id=RESOURCE, limits=has)


def status(url, key):
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}).status_code


def life(url, admin):
    settings = {"api_url": url, "api_token": admin, "models": ["m"], "usage_cache_ttl": 0}
    components = {
        name: {"measured_unit": "t", "accounting_type": "usage", "label": name}
        for name in ("input_tokens", "output_tokens")
    }
    begin = datetime.now(UTC)
    backend, usage = LiteLLMBackend(settings, components), LiteLLMUsageReportingBackend(settings, components)
    yield "ping", [backend.ping(), usage.ping()]
    backend.create_resource_with_id(resource(rpm=3), RESOURCE)
    keys = {made["client_id"]: made["api_key"] for made in backend.generate_resource_keys(RESOURCE)}
    first, second = sorted(keys)
    yield "ids", [name.removeprefix(RESOURCE) for name in backend.list_resource_client_ids(RESOURCE)]
    yield "limited", [status(url, keys[first]) for _ in range(4)]
    backend.sync_resource_limits(resource(), None)
    records = backend.litellm_client.list_keys(f"{RESOURCE}-")
    before = [record["updated_at"] for record in records]
    backend.sync_resource_limits(resource(), None)
    after = [record["updated_at"] for record in backend.litellm_client.list_keys(f"{RESOURCE}-")]
    yield "reconciled once", [record["rpm_limit"] for record in records] + [before == after]
    yield "unlimited", [status(url, keys[first]) for _ in range(4)]
    yield "paused", [backend.pause_resource(RESOURCE), *(status(url, key) for key in keys.values())]
    yield "active", backend.get_resource_metadata(RESOURCE)["active"]
    yield "restored", [backend.restore_resource(RESOURCE), *(status(url, key) for key in keys.values())]
    renewed = backend.rotate_resource_key(first, RESOURCE)
    yield "rotated", [status(url, keys[first]), status(url, renewed), status(url, keys[second])]
    yield "exists", backend.pull_resource(resource()) is not None
    try:
        backend.litellm_client.generate_key("priced", max_budget=1.0)
    except LiteLLMBackendError as error:
        yield "money", "FT8144" in str(error)
    backend.prune_unknown_resource_keys(RESOURCE, [second])
    yield "pruned", [name.removeprefix(RESOURCE) for name in backend.list_resource_client_ids(RESOURCE)]
    backend.delete_resource(resource())
    yield "deleted", [status(url, keys[second]), backend.list_resource_client_ids(RESOURCE)]
    for _ in range(200):  # records come to the store within seconds
        months = {(at.year, at.month) for at in (begin, datetime.now(UTC))}
        reports = [usage.get_usage_report_for_period([RESOURCE], *month) for month in months]
        billed = [report[RESOURCE]["TOTAL_ACCOUNT_USAGE"] for report in reports if RESOURCE in report]
        sums = {name: sum(used[name] for used in billed) for name in components}
        if sums["input_tokens"] == 33:
            break
        time.sleep(0.1)
    yield "billed", sums


if __name__ == "__main__":
    print(json.dumps(dict(life(*sys.argv[1:]))))
