"""Signing in: a link that works once, or the token in a form, either for a cookie."""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from statekit.service.web.keys import SESSION_SECONDS, TOKEN_FILE, Keys
from statekit.service.web.proxies import DIRECT, PublicAddress

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{head}<title>statekit: sign in</title>
<link rel="icon" href="/static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/static/statekit.css">
<link rel="stylesheet" href="/static/screens.css">
</head>
<body>
<header class="top">
<span class="brand"><img src="/static/icon.svg" alt="" width="20" height="20"> statekit</span>
</header>
<main>
<h1>Sign in</h1>
{body}
</main>
</body>
</html>
"""
_FORM = f"""<p>{{said}}</p>
<form method="post" action="/sign-in" autocomplete="off" class="filters">
<label for="token" class="wide">Token<input id="token" name="token" type="password" required autofocus></label>
<button type="submit" class="main">Sign in</button>
</form>
<p>The token is in the file <code>{TOKEN_FILE}</code> of the service's data folder.
Who starts the service sees a link, too, that signs in once.</p>
"""
_ENTERED = '<p>Signed in. <a href="/">Go on</a></p>\n'
_REFRESH = '<meta http-equiv="refresh" content="0; url={home}">\n'


def form(status: HTTPStatus, message: str = "This service knows its users by a token.") -> HTMLResponse:
    """Returns the page that asks for the token."""
    # The browser says the origin of a form that it posts only under this policy, and where it says nothing else of it
    # (no Sec-Fetch-Site without https, but for loopback) nobody could sign in.
    return HTMLResponse(
        _PAGE.format(head="", body=_FORM.format(said=message)), status, {"referrer-policy": "same-origin"}
    )


def router(keys: Keys, public: PublicAddress = DIRECT) -> APIRouter:
    """Returns the routes by which people sign in and out."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/sign-in")
    def sign_in(request: Request, code: str | None = None) -> Response:
        if code is None:
            return form(HTTPStatus.OK)
        if not keys.redeem(code):
            return form(
                HTTPStatus.UNAUTHORIZED, "This link was used already, or is from before the service started."
            )
        return entered(request)

    @routes.post("/sign-in")
    async def sign_in_by_token(request: Request) -> Response:
        fields = dict(parse_qsl((await request.body()).decode("utf-8", "replace")))
        if not keys.is_token(fields.get("token", "").strip()):
            return form(HTTPStatus.UNAUTHORIZED, "This isn't the token.")
        return entered(request)

    @routes.post("/sign-out")
    def sign_out(request: Request) -> Response:
        keys.sign_out(request.headers)
        page = form(HTTPStatus.OK, "Signed out.")
        page.delete_cookie(keys.cookie, public.prefix or "/", httponly=True, samesite="strict")
        return page

    def entered(request: Request) -> Response:
        # A page and no redirect: who came here from another site's link wouldn't bring a strict cookie along on one.
        head = _REFRESH.format(home=f"{public.prefix}/")
        page = HTMLResponse(_PAGE.format(head=head, body=_ENTERED))
        page.set_cookie(
            keys.cookie,
            keys.new_session(),
            max_age=SESSION_SECONDS,
            path=public.prefix or "/",
            httponly=True,
            samesite="strict",
            secure=public.is_secure or request.url.scheme == "https",
        )
        return page

    return routes
