"""API keys: who may ask."""

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tessera_cli.serving.api.errors import error_response

# A probe and a browser that has yet to ask its user have no key; neither page nor health tells a secret.
_PUBLIC_PATHS = frozenset({"/", "/health", "/favicon.ico"})
_PUBLIC_PREFIX = "/page/"


class ApiKeys:
    """Lets a request pass that has one of `keys` as its bearer token, and any to a public path."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_guarded(scope) and not self._is_known(scope):
            answer = error_response(401, "no API key, or an unknown one", code="invalid_api_key")
            answer.headers["WWW-Authenticate"] = "Bearer"
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_guarded(self, scope: Scope) -> bool:
        path = scope["path"]
        # What a browser asks before it asks carries no key.
        return not (path in _PUBLIC_PATHS or path.startswith(_PUBLIC_PREFIX) or scope["method"] == "OPTIONS")

    def _is_known(self, scope: Scope) -> bool:
        kind, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        given = token.strip().encode("latin-1", "replace")
        # Each key is compared whole, so that the time tells nothing of which one is nearly right.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return kind.lower() == "bearer" and any(matches)
