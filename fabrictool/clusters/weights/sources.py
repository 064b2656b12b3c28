"""Where the files of weights come from: a path here, a hub's repository at a commit, an address with a list."""

from __future__ import annotations

import hashlib
import http.client
import posixpath
import re
import time
import urllib.parse
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

from fabrictool.base.errors import FabrictoolError, InvalidInputError, UnreachableError
from fabrictool.clusters.weights.fetch import FetchRefusedError, PassingTrouble, Web, pause
from fabrictool.clusters.weights.listing import WeightsFile, WeightsListing, check_names, parse_listing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SUMS = "SHA256SUMS"
"""Of a folder's address: the list of its files, in the format of ``sha256sum``."""
_HUB = re.compile(r"hf://([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PIECE = 1 << 20
_TRIES = 4
T = TypeVar("T")


class _Large(msgspec.Struct):
    """Of a file that the hub keeps by its hash (LFS)."""

    oid: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Entry(msgspec.Struct):
    """One of a repository's tree."""

    type: str
    path: str
    size: Annotated[int, msgspec.Meta(ge=0)] = 0
    lfs: _Large | None = None


class _Revision(msgspec.Struct):
    sha: str = ""


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of a hub."""

    repository: str
    revision: str
    """A commit once it is pinned; a branch, a tag or "" before."""

    @property
    def text(self) -> str:
        return f"hf://{self.repository}@{self.revision}"

    def place(self, name: str) -> dict[str, str]:
        """Where `Fetcher` finds a file: beside the endpoint, which a site may have its own of."""
        quoted = urllib.parse.quote(name)
        return {"path": f"{self.repository}/resolve/{urllib.parse.quote(self.revision, safe='')}/{quoted}"}


@dataclass(frozen=True, slots=True)
class UrlSource:
    """A file, or with a slash at its end a folder."""

    url: str

    @property
    def text(self) -> str:
        return self.url

    def place(self, name: str) -> dict[str, str]:
        return {"url": f"{self.url}{urllib.parse.quote(name)}" if self.folder else self.url}

    @property
    def folder(self) -> bool:
        return self.url.endswith("/")

    @property
    def name(self) -> str:
        """Of the one file."""
        return urllib.parse.unquote(posixpath.basename(urllib.parse.urlsplit(self.url).path))


RemoteSource = HubSource | UrlSource


def remote_source(text: str) -> RemoteSource | None:
    """None for what lies on this machine. Raises FT5602 for what only looks like a hub's, or holds a password."""
    if text.startswith(("https://", "http://")):
        if "@" in urllib.parse.urlsplit(text).netloc:
            hint = "what is fetched there must need no password, or lie on a hub, which takes a token"
            raise InvalidInputError.of("FT5602", "an address with a user or a password is no source", hint=hint)
        return UrlSource(text)
    if not text.startswith("hf://"):
        return None
    match = _HUB.fullmatch(text)
    if match is None:
        hint = "write hf://ORGANISATION/NAME@REVISION"
        raise InvalidInputError.of("FT5602", f"{text} is no repository of a hub", hint=hint)
    return HubSource(match.group(1), match.group(2) or "")


def lock_remote(
    source: RemoteSource, environment: Mapping[str, str], progress: Callable[[int, int], None]
) -> tuple[RemoteSource, WeightsListing]:
    """The source with its commit, and its files with their hashes: of the hub's large files these are not downloaded.

    Raises
    ------
    FabrictoolError
        FT5602 a name cannot be listed or there is no file, FT5601 a folder's list is none, FT5608 it is not answered.
    """
    web = Web(environment)
    try:
        if isinstance(source, HubSource):
            return _of_hub(source, web, progress)
        if source.folder:
            text = web.read(f"{source.url}{SUMS}")[0].decode(errors="replace")
            text = re.sub(r"^([0-9a-f]{64}) \*", r"\1  ", text, flags=re.MULTILINE)  # its mark of binary files
            listing = parse_listing(text, f"{source.url}{SUMS}")
            return source, replace(listing, files=tuple(file for file in listing.files if file.name != SUMS))
        check_names([source.name], source.url)
        return source, WeightsListing((_hashed(web, source.url, source.name, progress),))
    except FetchRefusedError as error:
        raise not_fetched(error.kind, str(error), thing=source.text) from error


def not_fetched(kind: str, text: str, thing: str) -> FabrictoolError:
    """FT5608, or FT5603 without room, with what helps; `kind` as `FetchRefusedError` says it."""
    hints = {
        "denied": "ask for access, and keep your token where `hf auth login` does, or in HF_TOKEN",
        "absent": "correct the source, or its revision",
        "changed": "`fabrictool weights lock`, and review the difference",
        "full": "make room there, or `fabrictool weights prune`; what is there already is kept",
        "network": "run the command again: what is there already is kept; proxies are taken from the environment",
    }
    passing = kind == "network"
    error, code = UnreachableError if passing else InvalidInputError, "FT5603" if kind == "full" else "FT5608"
    return error.of(code, text, thing=thing, hint=hints.get(kind), transient=passing)


def _of_hub(source: HubSource, web: Web, progress: Callable[[int, int], None]) -> tuple[RemoteSource, WeightsListing]:
    api = f"{web.endpoint}/api/models/{source.repository}"
    revision = urllib.parse.quote(source.revision or "main", safe="")
    commit = _document(web, f"{api}/revision/{revision}", _Revision)[0].sha
    if not _COMMIT.fullmatch(commit):
        raise FetchRefusedError("refused", f"{web.endpoint} names no commit of {source.repository}")
    pinned = replace(source, revision=commit)
    entries = [entry for entry in _tree(web, f"{api}/tree/{commit}?recursive=true") if _shown(entry.path)]
    check_names([entry.path for entry in entries], source.text)
    small = sum(entry.size for entry in entries if entry.lfs is None)
    done, files = 0, []
    for entry in sorted(entries, key=lambda entry: entry.path):
        if entry.lfs is not None:
            files.append(WeightsFile(entry.path, entry.lfs.oid, entry.size))
            continue
        url = f"{web.endpoint}/{pinned.place(entry.path)['path']}"
        files.append(_hashed(web, url, entry.path, lambda octets, _, done=done: progress(done + octets, small)))  # type: ignore[misc]
        done += entry.size
    return pinned, WeightsListing(tuple(files))


def _shown(path: str) -> bool:
    return not any(part.startswith(".") for part in path.split("/"))


def _tree(web: Web, url: str) -> Iterator[_Entry]:
    while url:
        entries, link = _document(web, url, list[_Entry])
        yield from (entry for entry in entries if entry.type == "file")
        after = re.search(r'<([^>]+)>;\s*rel="next"', link)
        url = urllib.parse.urljoin(url, after.group(1)) if after else ""


def _document(web: Web, url: str, kind: type[T]) -> tuple[T, str]:
    """Raises FetchRefusedError for what a hub does not answer."""
    data, link = web.read(url)
    try:
        return msgspec.json.decode(data, type=kind), link
    except msgspec.DecodeError as error:
        raise FetchRefusedError("refused", f"{url} answers otherwise than a hub: {error}") from error


def _hashed(web: Web, url: str, name: str, progress: Callable[[int, int], None]) -> WeightsFile:
    """Read once, stored nowhere; begun again when the connection breaks."""
    for tries in range(1, _TRIES + 1):
        digest, octets = hashlib.sha256(), 0
        try:
            with web.open(url) as answer:
                total = int(answer.headers.get("Content-Length") or 0)
                while piece := answer.read(_PIECE):
                    digest.update(piece)
                    octets += len(piece)
                    progress(octets, max(octets, total))
            if octets >= total:
                return WeightsFile(name, digest.hexdigest(), octets)
            trouble = PassingTrouble("the connection broke")
        except PassingTrouble as error:
            trouble = error
        except (OSError, http.client.HTTPException) as error:
            trouble = PassingTrouble(str(error))
        time.sleep(pause(tries, trouble.wait_s))
    raise FetchRefusedError("network", f"{name}: {trouble}")
