"""Models of a Hugging Face hub, by its own library: its cache, tokens, HF_ENDPOINT, resuming and HF_HUB_OFFLINE hold.

No code is fetched. The library is imported where it is used, since it takes longer than all else here.
"""

import errno
import logging
import os
import pathlib
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ckdist.errors import ConfigError, FetchError
from ckdist.hub.choice import choose_files, gguf_models
from ckdist.hub.store import disk_problem, sha256_of
from ckdist.progress import REDRAW_SECONDS, ProgressBar

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

log = logging.getLogger(__name__)

PREFIX = "hf:"
NAME = re.compile(r"(?P<repository>[\w.-]{1,96}/[\w.-]{1,96})(?::(?P<wanted>[^:]{1,512}))?", re.ASCII)
LIST_SECONDS = 15.0  # until the hub has answered what files there are
Result = TypeVar("Result")


class _Unreachable(Exception):  # noqa: N818 - it never leaves this file
    """The hub does not answer, or not with what was asked for."""


@dataclass(frozen=True)
class Listing:
    """The files of a repository: `sizes` in bytes by name (0: unknown), `digests` the SHA-256 of large ones.

    `snapshot`: the folder in the cache where all of them are; None for what the hub has.
    """

    sizes: dict[str, int]
    digests: dict[str, str]
    snapshot: pathlib.Path | None = None


def fetch_repository(name: str, progress: bool = False) -> pathlib.Path:
    """The GGUF file or the folder that `hf:owner/repo[:quant or file]` names, in the library's cache.

    What is not there is fetched, and one line says so; with `progress` a bar follows it on a terminal.

    Raises ConfigError for what does not exist or is not allowed, FetchError for a network or disk that does not do.
    """
    match = NAME.fullmatch(name.removeprefix(PREFIX))
    if match is None:
        raise ConfigError(
            f"{name} is not the name of a repository: "
            "write hf:owner/repo, hf:owner/repo:Q4_K_M or hf:owner/repo:file.gguf"
        )
    _quiet()
    repository, wanted = match["repository"], match["wanted"] or ""
    listing = _listing(repository)
    files = choose_files(list(listing.sizes), wanted, PREFIX + repository)
    if listing.snapshot is not None:
        paths = [listing.snapshot / file for file in files]
    else:
        paths = _download(repository, files, listing, progress)
    return paths[0].parent if paths[0].name == "config.json" else paths[0]


def _quiet() -> None:
    """What the library and its HTTP client log of every request and retry is left out, its bars too; errors come as
    exceptions.
    """
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging

    with warnings.catch_warnings():  # where HF_HUB_DISABLE_PROGRESS_BARS says otherwise
        warnings.simplefilter("ignore")
        disable_progress_bars()
    hub_logging.set_verbosity_error()
    for client in ("httpx", "httpx2", "urllib3"):
        logging.getLogger(client).setLevel(logging.ERROR)


def _listing(repository: str) -> Listing:
    """What the hub has, or else what the cache has."""
    from huggingface_hub import HfApi

    try:
        info = _call(repository, lambda: HfApi().model_info(repository, files_metadata=True, timeout=LIST_SECONDS))
    except _Unreachable as problem:
        if (found := _cached(repository)) is not None:
            log.info("the hub does not say what %s has (%s): what is in the cache is used", repository, problem)
            return found
        raise FetchError(
            f"{PREFIX}{repository} could not be fetched: {problem}, and nothing of it is in the cache; "
            "look at the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        ) from None
    siblings = info.siblings or []
    digests = {s.rfilename: s.lfs["sha256"] for s in siblings if s.lfs and s.lfs.get("sha256")}
    return Listing({s.rfilename: s.size or 0 for s in siblings}, digests)


def _cached(repository: str) -> Listing | None:
    """What the cache has of a repository; None where that is nothing."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cached = [repo for repo in scan_cache_dir().repos if (repo.repo_type, repo.repo_id) == ("model", repository)]
    except (CacheNotFound, OSError):
        return None
    return _newest(cached[0]) if cached else None


def _newest(repo: "CachedRepoInfo") -> Listing | None:
    """The files of a cached repository's newest snapshot, that of `main` before others."""
    revisions = [revision for revision in repo.revisions if revision.files]
    if not revisions:
        return None
    newest = max(revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified))
    sizes = {file.file_path.relative_to(newest.snapshot_path).as_posix(): file.size_on_disk for file in newest.files}
    return Listing(sizes, {}, newest.snapshot_path)


def _download(repository: str, files: list[str], listing: Listing, progress: bool) -> list[pathlib.Path]:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    new = [file for file in files if not isinstance(try_to_load_from_cache(repository, file), str)]
    if new:
        size = sum(listing.sizes[file] for file in new)
        log.info(
            "fetching %s%s: %s (%.0f MB)",
            PREFIX,
            repository,
            new[0] if len(new) == 1 else f"{len(new)} files",
            size / 1e6,
        )
    paths = []
    for file in files:
        fetch = partial(hf_hub_download, repository, file)
        watched = progress and file in new
        try:
            action = partial(_watched, fetch, repository, file, listing.sizes[file]) if watched else fetch
            path = pathlib.Path(_call(repository, action))
        except _Unreachable as problem:
            raise FetchError(f"{PREFIX}{repository}: {file} could not be fetched: {problem}; try again") from None
        if file in new and file in listing.digests and sha256_of(path) != listing.digests[file]:
            _forget(path)
            raise FetchError(
                f"{PREFIX}{repository}: {file} came damaged: its SHA-256 is not {listing.digests[file][:16]}…; "
                "nothing was kept; try again"
            )
        paths.append(path)
    return paths


def _watched(fetch: Callable[[], str], repository: str, file: str, size: int) -> str:
    """What `fetch` returns or raises, with a bar that follows the unfinished files in the repository's cache."""
    with ProgressBar(size, "B", f"fetching {file}") as bar:
        if not bar.shown:
            return fetch()
        result: Future[str] = Future()
        # A daemon, so that Ctrl-C ends the program and not only this wait.
        threading.Thread(target=_settle, args=[result, fetch], name="fetch", daemon=True).start()
        folder = pathlib.Path(_cache_folder(), "models--" + repository.replace("/", "--"))
        while not wait([result], REDRAW_SECONDS).done:
            came = sum(_size(path) for path in folder.glob("blobs/*.incomplete"))
            bar.update(max(0, min(came, size) - bar.n))
        return result.result()


def _settle(result: "Future[str]", action: Callable[[], str]) -> None:
    try:
        result.set_result(action())
    except BaseException as error:
        result.set_exception(error)


def _size(path: pathlib.Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it has its name now
        return 0


def _forget(path: pathlib.Path) -> None:
    """Removes a file from the cache: what the snapshot's link points to, and the link."""
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _call(repository: str, action: Callable[[], Result]) -> Result:
    """What `action` returns. Its exceptions become ConfigError, FetchError (the disk) or _Unreachable."""
    from huggingface_hub import constants, errors

    name = PREFIX + repository
    try:
        with warnings.catch_warnings():  # of a disk that may be too small, before the error
            warnings.simplefilter("ignore")
            return action()
    except errors.GatedRepoError:
        raise ConfigError(
            f"{name} is gated: accept its terms on its page, and set HF_TOKEN or run hf auth login"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{name} does not exist, or is private: look at its spelling, or set HF_TOKEN or run hf auth login"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise _Unreachable("HF_HUB_OFFLINE is set") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)  # older releases: the response may be None
        if status in (401, 403):
            raise ConfigError(
                f"{name} is refused (HTTP {status}): set HF_TOKEN to a token that may read it, or run hf auth login"
            ) from None
        raise _Unreachable(f"the hub answered with HTTP {status}" if status else _one_line(error)) from None
    except Exception as error:  # of an HTTP client that is another in every major release of the library
        if full := _full_disk(error):
            raise FetchError(disk_problem(pathlib.Path(constants.HF_HUB_CACHE), full, "HF_HOME")) from None
        if isinstance(error, (MemoryError, ImportError, TypeError, AttributeError)):
            raise
        raise _Unreachable(_one_line(error)) from None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what led to it, the first cause last."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _full_disk(error: BaseException) -> OSError | None:
    """The error of a disk among what led to `error`."""
    refused = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
    return next((e for e in _causes(error) if isinstance(e, OSError) and e.errno in refused), None)


def _one_line(error: BaseException) -> str:
    *_, error = _causes(error)
    text = "".join(c if c.isprintable() else " " for c in str(error))[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def cached_models() -> list[tuple[str, int, str]]:
    """Name, bytes and path of what `-m` can name in the library's cache: GGUF files, and folders with safetensors."""
    if not os.path.isdir(_cache_folder()):  # noqa: PTH112 - False as well where it may not be looked at
        return []
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except (CacheNotFound, OSError):
        return []
    found = [(PREFIX + repo.repo_id, _newest(repo)) for repo in sorted(repos, key=lambda repo: repo.repo_id)]
    return [row for name, listing in found if listing is not None for row in _models(name, listing)]


def _models(name: str, listing: Listing) -> Iterator[tuple[str, int, str]]:
    """The rows of one repository in the cache, whose snapshot is known."""
    if listing.snapshot is None:
        return
    names = sorted(listing.sizes)
    for model in gguf_models(names) or [""]:
        try:
            files = choose_files(names, model, name)
        except ConfigError:  # a part is missing, or it is no model
            continue
        path = listing.snapshot / model if model else listing.snapshot
        yield f"{name}:{model}" if model else name, sum(listing.sizes[file] for file in files), str(path)


def _cache_folder() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE
