"""A slash behind a path changes nothing: `/v1/completions/` is `/v1/completions`.

Frameworks redirect such requests, to an address that clients behind a proxy cannot reach.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlash:
    """Takes the slash off a request's path, for all layers behind this one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            drop_trailing_slash(scope)
        await self._app(scope, receive, send)


def drop_trailing_slash(scope: Scope) -> None:
    """Takes one slash off the end of the path, unless it is the whole path."""
    if len(scope["path"]) > 1:
        scope["path"] = scope["path"].removesuffix("/")
    if "raw_path" in scope and len(scope["raw_path"]) > 1:
        scope["raw_path"] = scope["raw_path"].removesuffix(b"/")
