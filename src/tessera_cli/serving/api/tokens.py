"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

import asyncio
from typing import Any

from fastapi import APIRouter

from tessera_cli.errors import UsageError
from tessera_cli.serving.api.conversation import encode_conversation
from tessera_cli.serving.api.json_route import JsonRoute
from tessera_cli.serving.api.protocol import DetokenizeRequest, TokenizeRequest
from tessera_cli.serving.api.service import Serving

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: Serving) -> dict[str, Any]:
    """The token ids of a text, or of a chat through the template."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise UsageError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        _refuse(body, "add_generation_prompt", "messages")
        adds = body.add_special_tokens is not False
        tokens = await service.encode(body.prompt, add_special_tokens=adds)
    else:
        _refuse(body, "add_special_tokens", "prompt")
        tokens = await encode_conversation(
            service.llm.tokenizer,
            body.messages or [],
            add_generation_prompt=body.add_generation_prompt is not False,
        )
    return {"count": len(tokens), "max_model_len": service.llm.max_model_len, "tokens": tokens}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: Serving) -> dict[str, str]:
    """The text of token ids, special tokens included."""
    service.check_model(body.model)
    tokenizer = service.llm.tokenizer
    bad = next((token for token in body.tokens if token >= tokenizer.vocab_size), None)
    if bad is not None:
        raise UsageError(
            f"no token id {bad}", hint=f"the ids go from 0 to {tokenizer.vocab_size - 1}", param="tokens"
        )
    return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)}


def _refuse(body: TokenizeRequest, param: str, other: str) -> None:
    if getattr(body, param) is not None:
        raise UsageError(f"{param} goes with {other}", param=param)
