"""Models of the Hugging Face Hub, fetched with its library: its cache, tokens, HF_ENDPOINT and HF_HUB_OFFLINE apply.

Code is never fetched. The library is imported on demand, because its import takes longer than all others here.
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
from ckdist.hub.file_choice import choose_files, gguf_models
from ckdist.hub.model_url import PREFIX, typed_line
from ckdist.hub.store import disk_problem, sha256_of
from ckdist.progress import REDRAW_SECONDS, ProgressBar

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

log = logging.getLogger(__name__)

NAME = re.compile(r"(?P<repository>[\w.-]{1,96}/[\w.-]{1,96})(?::(?P<wanted>[^:]{1,512}))?", re.ASCII)
LIST_SECONDS = 15.0  # limit for the list of files
Result = TypeVar("Result")


class _Unreachable(Exception):  # noqa: N818 - it never leaves this file
    """The hub does not answer, or not with the requested data."""


@dataclass(frozen=True)
class Listing:
    """The files of a repository, on the hub or in the cache."""

    sizes: dict[str, int]  # name -> bytes; 0: unknown
    digests: dict[str, str]  # name -> SHA-256, of large files
    snapshot: pathlib.Path | None = None  # folder in the cache with all files; None: the files are on the hub


def fetch_repository(name: str, progress: bool = False) -> pathlib.Path:
    """Returns the file or folder of `hf:owner/repo[:quant or file]` in the library's cache. Fetches missing files.

    Args:
        progress: Show a bar on a terminal, in addition to the log line.

    Raises:
        ConfigError: The repository or file does not exist or is not allowed.
        FetchError: The network or the disk failed.
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
    """Silences the log and the bars of the library and its HTTP client. Errors are raised as exceptions."""
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging

    with warnings.catch_warnings():  # HF_HUB_DISABLE_PROGRESS_BARS=0 would warn
        warnings.simplefilter("ignore")
        disable_progress_bars()
    hub_logging.set_verbosity_error()
    for client in ("httpx", "httpx2", "urllib3"):
        logging.getLogger(client).setLevel(logging.ERROR)


def _listing(repository: str) -> Listing:
    """Returns the files on the hub. If it is unreachable, returns those in the cache."""
    from huggingface_hub import HfApi

    try:
        info = _call(repository, lambda: HfApi().model_info(repository, files_metadata=True, timeout=LIST_SECONDS))
    except _Unreachable as problem:
        if (found := _cached(repository)) is not None:
            log.info("the hub does not list the files of %s (%s): using the cache", repository, problem)
            return found
        raise FetchError(
            f"{PREFIX}{repository} could not be fetched: {problem}, and nothing of it is in the cache; "
            "check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        ) from None
    siblings = info.siblings or []
    digests = {s.rfilename: s.lfs["sha256"] for s in siblings if s.lfs and s.lfs.get("sha256")}
    return Listing({s.rfilename: s.size or 0 for s in siblings}, digests)


def _cached(repository: str) -> Listing | None:
    """The cached files of a repository; None if there are none."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cached = [repo for repo in scan_cache_dir().repos if (repo.repo_type, repo.repo_id) == ("model", repository)]
    except (CacheNotFound, OSError):
        return None
    return _newest(cached[0]) if cached else None


def _newest(repo: "CachedRepoInfo") -> Listing | None:
    """The files of a cached repository's newest snapshot. A snapshot of `main` has precedence."""
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
                f"{PREFIX}{repository}: {file} is damaged: its SHA-256 is not {listing.digests[file][:16]}…; "
                "nothing was kept; try again"
            )
        paths.append(path)
    return paths


def _watched(fetch: Callable[[], str], repository: str, file: str, size: int) -> str:
    """Runs `fetch` with a bar that follows the size of incomplete files in the repository's cache."""
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
        path = result.result()
        bar.update(size - bar.n)
        return path


def _settle(result: "Future[str]", action: Callable[[], str]) -> None:
    try:
        result.set_result(action())
    except BaseException as error:
        result.set_exception(error)


def _size(path: pathlib.Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it was renamed: the download is complete
        return 0


def _forget(path: pathlib.Path) -> None:
    path.resolve().unlink(missing_ok=True)  # the target of the snapshot's link
    path.unlink(missing_ok=True)


def _call(repository: str, action: Callable[[], Result]) -> Result:
    """Runs `action`. Its exceptions become ConfigError, FetchError (a full disk) or _Unreachable."""
    from huggingface_hub import constants, errors

    name = PREFIX + repository
    try:
        with warnings.catch_warnings():  # a warning about a small disk, before the error
            warnings.simplefilter("ignore")
            return action()
    except errors.GatedRepoError:
        raise ConfigError(
            f"{name} is gated: accept its terms on its page, and set HF_TOKEN or run hf auth login"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{name} does not exist, or is private: check its spelling, or set HF_TOKEN or run hf auth login"
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
    except Exception as error:  # the HTTP client differs between major releases
        if full := _full_disk(error):
            raise FetchError(disk_problem(pathlib.Path(constants.HF_HUB_CACHE), full, "HF_HOME")) from None
        if isinstance(error, (MemoryError, ImportError, TypeError, AttributeError)):
            raise
        raise _Unreachable(_one_line(error)) from None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields `error` and its causes. The first cause is last."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _full_disk(error: BaseException) -> OSError | None:
    """The error of a full or read-only disk among the causes of `error`."""
    refused = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
    return next((e for e in _causes(error) if isinstance(e, OSError) and e.errno in refused), None)


def _one_line(error: BaseException) -> str:
    *_, error = _causes(error)
    return typed_line(error)


def cached_models() -> list[tuple[str, int, str]]:
    """Returns (name, bytes, path) of the models in the library's cache: GGUF files, and safetensors folders."""
    if not os.path.isdir(_cache_folder()):  # noqa: PTH112 - also False if access is denied
        return []
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except (CacheNotFound, OSError):
        return []
    found = [(PREFIX + repo.repo_id, _newest(repo)) for repo in sorted(repos, key=lambda repo: repo.repo_id)]
    return [row for name, listing in found if listing is not None for row in _models(name, listing)]


def _models(name: str, listing: Listing) -> Iterator[tuple[str, int, str]]:
    """Yields the rows of one cached repository."""
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
