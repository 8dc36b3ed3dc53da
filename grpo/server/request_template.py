"""Render a chat template that came with a request: in a process of its own, with limits.

A template is a program: a loop in it may run for ever, and a product of texts may take all memory.
So it runs in a child that has so much time, so much memory and so much to say, and knows of nothing
but the request. As a script this file is that child; it imports nothing of this library.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from datetime import datetime
from typing import Any

SECONDS = 5.0
MEMORY_BYTES = 512 << 20
MAX_CHARACTERS = 4 << 20
_AT_A_TIME = 2
_turn = asyncio.Semaphore(_AT_A_TIME)


async def render_apart(template: str, variables: dict[str, Any], *,
                       seconds: float = SECONDS) -> str:
    """The text that a template makes of some variables, JSON values with ``messages`` among them.

    The template is Jinja with what Transformers adds to it. The start of the child counts among its
    seconds.

    Raises:
        ValueError: with what is wrong with the template, or which limit it met.
    """
    request = json.dumps({"template": template, "variables": variables}).encode()
    async with _turn:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-I", __file__, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
        try:
            answer, _ = await asyncio.wait_for(child.communicate(request), seconds)
        except TimeoutError:
            raise ValueError(f"it was not done after {seconds:g} s") from None
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
    if child.returncode:
        raise ValueError(f"it needs more than {MEMORY_BYTES >> 20} MiB, or broke its process")
    found = json.loads(answer)
    if "error" in found:
        raise ValueError(found["error"])
    return found["text"]


def render(template: str, variables: dict[str, Any]) -> str:
    """The text, in this process and with no limit but that of its length.

    Examples:
        >>> render("{% for m in messages %}{{ m.content }}{% endfor %}",
        ...        {"messages": [{"role": "user", "content": "1+2="}]})
        '1+2='
    """
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception,
                            "strftime_now": lambda form: datetime.now().strftime(form)}
    pieces, size = [], 0
    for piece in environment.from_string(template).generate(**variables):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise ValueError(f"it makes more than {MAX_CHARACTERS} characters")
    return "".join(pieces)


def main() -> None:
    """Read a request from standard input, and write the text, or what is wrong, to the output."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    seconds = int(SECONDS) + 1  # should whoever waits die first
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    request = json.loads(sys.stdin.buffer.read())
    try:
        answer = {"text": render(request["template"], request["variables"])}
    except Exception as error:  # whatever a stranger's program raises is what is wrong with it
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    sys.stdout.buffer.write(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
