"""The HTTP application of a server with several models."""

from functools import partial

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route

from ckdist.serve.access import Access
from ckdist.serve.app import PATHS, application
from ckdist.serve.model_router import ModelRouter
from ckdist.serve.paths import (
    absent,
    conversations,
    file_batches,
    message_batches,
    models,
    ollama,
    page,
    stored_responses,
)
from ckdist.serve.paths.path import PathNames
from ckdist.serve.router_metrics import RouterMetrics


def create_router_app(router: ModelRouter, metrics: RouterMetrics) -> Access:
    """Returns the ASGI application of a server with several models."""
    own = {path.name for path in models.PATHS}
    any_service = next(iter(router.models.values())).service  # for paths that are the same for all models
    refused = [path for path in ollama.PATHS if path.handle is ollama.refuse and path.name not in own]
    same = (
        *refused,
        *absent.PATHS,
        *stored_responses.KEPT_PATHS,
        *conversations.PATHS,
        *file_batches.PATHS,
        *message_batches.PATHS,
        *(() if router.settings.no_webui else page.PATHS),
    )
    hosted = [path for path in PATHS if path.name not in own and path not in same]
    routes: list[BaseRoute] = [
        Route("/metrics", lambda _: metrics.answer()),
        *(Route(path.name, partial(path.handle, router), methods=list(path.methods)) for path in models.PATHS),
        *(Route(path.name, partial(models.pass_on, router, path), methods=list(path.methods)) for path in hosted),
        *(Route(path.name, partial(path.handle, any_service), methods=list(path.methods)) for path in same),
    ]
    names = ["/metrics", *own, *(path.name for path in hosted), *(path.name for path in same)]
    return Access(application(routes), router.settings, router.accounts, metrics.http, PathNames(names))


def create_router_watching_app(router: ModelRouter, metrics: RouterMetrics) -> Starlette:
    """Returns the ASGI application of the metrics port of such a server."""
    routes = [Route(path.name, partial(path.handle, router)) for path in models.WATCHING_PATHS]
    return application([*routes, Route("/metrics", lambda _: metrics.answer())])
