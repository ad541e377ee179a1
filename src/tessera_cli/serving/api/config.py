"""What a server is started with, beside its model."""

from dataclasses import dataclass

MiB = 1 << 20


@dataclass(frozen=True)
class ServerConfig:
    """The bounds and the names of one server.

    Attributes:
        model_names: what requests may call the model; the first is what answers call it.
        api_keys: one of them has to come with a request; without any, none is needed.
        allowed_origins: web pages of these origins may call the server; "*" is any.
        max_body_size: bytes of one request's body.
        body_timeout: seconds in which the body has to be there.
        request_timeout: seconds in which an answer has to be whole; None is for ever.
        log_prompts: whether the access log has the bodies of requests.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_size: int = 4 * MiB
    body_timeout: float = 30.0
    request_timeout: float | None = None
    log_prompts: bool = False
