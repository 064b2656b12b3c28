#!/usr/bin/env bash
# Put OUT/comment.md on the pull or merge request: one comment of ours a fabric, changed in place.
#
# GitHub: GITHUB_API_URL, GITHUB_REPOSITORY, GITHUB_TOKEN, and PULL_REQUEST, its number.
# GitLab: CI_API_V4_URL, CI_PROJECT_ID, CI_MERGE_REQUEST_IID, and GITLAB_TOKEN, a project's token with the scope api.
set -euo pipefail
exec python3 - "${OUT:-out}/comment.md" <<'PYTHON'
import json
import os
import sys
import urllib.request

with open(sys.argv[1], encoding="utf-8") as file:
    body = file.read()
marker = body.partition("\n")[0]
assert marker.startswith("<!-- fabrictool plan "), "the file begins with no marker of ours"
env = os.environ
github = "CI_API_V4_URL" not in env


def ask(method, url, content=None):
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data=data, method=method)
    request.add_header("Content-Type", "application/json")
    if github:
        request.add_unredirected_header("Authorization", "Bearer " + env["GITHUB_TOKEN"])
    else:
        request.add_unredirected_header("PRIVATE-TOKEN", env["GITLAB_TOKEN"])
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


if github:
    base = f"{env.get('GITHUB_API_URL', 'https://api.github.com')}/repos/{env['GITHUB_REPOSITORY']}/issues"
    comments, one, change = f"{base}/{env['PULL_REQUEST']}/comments", f"{base}/comments", "PATCH"
    me = env.get("COMMENT_AUTHOR", "github-actions[bot]")
else:
    base = f"{env['CI_API_V4_URL']}/projects/{env['CI_PROJECT_ID']}/merge_requests/{env['CI_MERGE_REQUEST_IID']}"
    comments = one = f"{base}/notes"
    change = "PUT"
    me = ask("GET", f"{env['CI_API_V4_URL']}/user")["username"]


def author(comment):
    return comment["user"]["login"] if github else comment["author"]["username"]


mine, page = None, 1
while mine is None:
    found = ask("GET", f"{comments}?per_page=100&page={page}")
    # Anybody can write the marker: only a comment that we made ourselves is changed.
    mine = next((each for each in found if each["body"].startswith(marker) and author(each) == me), None)
    if len(found) < 100:
        break
    page += 1
if mine is None:
    ask("POST", comments, {"body": body})
    print("commented")
elif mine["body"] == body:
    print("the comment says so already")
else:
    ask(change, f"{one}/{mine['id']}", {"body": body})
    print("changed the comment")
PYTHON
