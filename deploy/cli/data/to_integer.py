"""Owns `penstock data to-integer`: a data set whose problems all have integer answers, rewritten by a model.

Must not word a problem; deploy.cli.data.rewriting does.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock_client.cli.reporting import EXIT_INTERRUPTED, fail
from penstock_client.cli.terminal import plain, print_line

if TYPE_CHECKING:
    from pydantic import SecretStr

    from deploy.cli.data.chat import ChatModel
    from deploy.cli.data.problems import NumberedProblem
    from deploy.cli.data.rewriting import Problem
    from deploy.cli.data.written import WrittenRows
    from verifier.remote.faults import ServiceFaultError

app = typer.Typer(help="Prepare data sets.", no_args_is_help=True)

COPIED, REWRITTEN, FAILED = "copied", "rewritten", "failed"
FIRST_REFUSALS = 3
"""So many refused rows, without one request that succeeded, say that the service refuses all of them."""
MOST_CAUSES = 10
"""In the summary: a service may word each refusal differently."""


@app.callback()
def data() -> None:
    """Prepare data sets."""


InputArgument = Annotated[Path, typer.Argument(metavar="INPUT", help="JSONL, CSV, Parquet, or a dataset folder.")]
OutputArgument = Annotated[Path, typer.Argument(metavar="OUTPUT", help="JSON lines; continued if it exists.")]
UrlOption = Annotated[str, typer.Option("--url", help="An OpenAI-compatible API, such as http://127.0.0.1:8000/v1.")]
ModelOption = Annotated[str, typer.Option("--model", help="The model's name there.")]
KeyOption = Annotated[
    str | None, typer.Option("--key", metavar="VARIABLE", help="The environment variable with the API's key.")
]
CheckOption = Annotated[bool, typer.Option("--check", help="Ask again whether the new problem has this answer.")]
KeepOption = Annotated[
    bool, typer.Option("--keep-failed", help="Keep rows that fail as they are, with the cause; default: drop them.")
]
LayoutOption = Annotated[str, typer.Option("--layout", help="fields, penstock or dapo-math-17k, as in recipes.")]
QuestionOption = Annotated[str, typer.Option("--question", help="With layout fields: the question's field.")]
AnswerOption = Annotated[str, typer.Option("--answer", help="With layout fields: the answer's field.")]
AfterOption = Annotated[
    str | None, typer.Option("--answer-after", help="The answer is the text after the last such mark.")
]
SplitOption = Annotated[str | None, typer.Option("--split", help="Of a dataset folder.")]
ConcurrencyOption = Annotated[int, typer.Option("--concurrency", min=1, max=256, help="Requests at once.")]
RequestTimeoutOption = Annotated[float, typer.Option("--timeout", min=1, help="Seconds of one request.")]
AttemptsOption = Annotated[int, typer.Option("--attempts", min=1, max=10, help="Attempts of one request.")]
TokensOption = Annotated[int, typer.Option("--answer-tokens", min=1, help="Longest answer of the model.")]


@app.command("to-integer")
def to_integer(
    source: InputArgument,
    output: OutputArgument,
    url: UrlOption,
    model: ModelOption,
    key: KeyOption = None,
    check: CheckOption = False,
    keep_failed: KeepOption = False,
    layout: LayoutOption = "fields",
    question: QuestionOption = "question",
    answer: AnswerOption = "answer",
    answer_after: AfterOption = None,
    split: SplitOption = None,
    concurrency: ConcurrencyOption = 8,
    timeout: RequestTimeoutOption = 120.0,
    attempts: AttemptsOption = 4,
    answer_tokens: TokensOption = 4096,
) -> None:
    """Rewrite each problem so that its answer is an integer (DAPO paper, Appendix A), by any OpenAI-compatible model.

    Rows whose answer is an integer are copied without a request; rows that cannot be rewritten are dropped and counted.
    An interrupted command continues after the last row in OUTPUT, which a recipe loads with `layout: fields`.
    """
    from pydantic import ValidationError

    from deploy.cli.data.problems import problems, source_of
    from deploy.cli.data.written import OutputError, opened
    from services.sampler.data import DataError
    from verifier.remote.faults import RemoteSetupError, ServiceFaultError

    fields = {"question": question, "answer": answer, "answer_after": answer_after}
    # The first request that fails for good ends the command; the breaker must not take attempts from the others.
    failures = 2 * concurrency * attempts + 1
    limits = {"timeout_s": timeout, "attempts": attempts, "concurrency": concurrency, "breaker_failures": failures}
    try:
        settings = source_of(source, layout, split, fields if layout == "fields" else {})
        asked = _Model(url, model, key, answer_tokens, limits)
        with opened(output, source) as written:
            work = _Transformation(written, concurrency, check=check, keep_failed=keep_failed)
            asyncio.run(work.run(asked, problems(settings)))
            print_line(plain(work.summary))
    except ValidationError as error:
        fail("\n".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()))
    except (DataError, OutputError, RemoteSetupError, OSError, ValueError) as error:
        fail(str(error))
    except ServiceFaultError as error:
        fail(f"{error}; what is done is in {output}, and the same command continues it")
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


@dataclass(frozen=True)
class _Model:
    """What is needed to talk to a model once an event loop runs."""

    url: str
    name: str
    key: str | None
    answer_tokens: int
    limits: dict[str, Any]

    def opened(self) -> ChatModel:
        """The model. Raises RemoteSetupError, ValidationError."""
        from deploy.cli.data.chat import ChatModel
        from services.settings.rewards.kinds import RemoteReward
        from verifier.remote.signature import secret_from

        secret: SecretStr | None = secret_from(os.environ, "--key", self.key) if self.key else None
        options = RemoteReward.model_validate({"url": self.url} | self.limits)
        return ChatModel(options, self.name, secret, self.answer_tokens)


class _Done(NamedTuple):
    """What became of a row: its line, None if nothing is written of it, and why the service refused it, '' if not."""

    line: dict[str, Any] | None
    refusal: str = ""


@dataclass
class _Transformation:
    """Rewrites problems, `concurrency` at once, and writes them in the order of their rows."""

    written: WrittenRows
    concurrency: int
    check: bool
    keep_failed: bool
    results: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    held: list[_Done] = field(default_factory=list)
    refusals: int = 0

    async def run(self, model: _Model, rows: Iterator[NumberedProblem]) -> None:
        """Rewrite all rows that are not written yet. Raises ServiceFaultError when the model cannot be used."""
        waiting: deque[asyncio.Task[_Done]] = deque()
        self._earlier = len(self.written)
        async with model.opened() as chat:
            try:
                for row in rows:
                    self.written.check(row.number, row.problem)
                    if row.number <= self.written.last:
                        continue
                    waiting.append(asyncio.create_task(self._line(chat, row)))
                    if len(waiting) >= 2 * self.concurrency:
                        self._take(await waiting.popleft(), chat.answered)
                while waiting:
                    self._take(await waiting.popleft(), chat.answered)
                if self.held and not self.written.rewritten:
                    raise self._unusable()
                self._write()
            finally:
                await _end(waiting)

    def _take(self, done: _Done, answered: bool) -> None:
        """Write a row; from a refused one on hold them until a request has succeeded.

        If none does, the refusals say nothing of the rows, which the same command shall ask for again.
        """
        self.held.append(done)
        self.refusals += bool(done.refusal)
        if answered or not self.refusals:
            self._write()
        elif self.refusals >= FIRST_REFUSALS:
            raise self._unusable()

    def _write(self) -> None:
        for done in self.held:
            if done.line is not None:
                self.written.append(done.line)
        self.held.clear()

    def _unusable(self) -> ServiceFaultError:
        from verifier.remote.faults import ServiceFaultError

        refusal = next(done.refusal for done in self.held if done.refusal)
        return ServiceFaultError(f"no request has succeeded; {refusal}")

    async def _line(self, chat: ChatModel, row: NumberedProblem) -> _Done:
        from deploy.cli.data.rewriting import RefusedRewriteError, RewriteError, is_integer
        from deploy.cli.data.written import ORIGINAL, digest_of

        known = {"row": row.number, "digest": digest_of(row.problem)}
        original = {"question": row.problem.question, "answer": row.problem.answer}
        try:
            if row.fault:
                raise RewriteError(row.fault)
            if is_integer(row.problem.answer):
                self.results[COPIED] += 1
                return _Done(original | known)
            rewritten = await self._rewritten(chat, row.problem)
        except RewriteError as error:
            self.results[FAILED] += 1
            self.causes[str(error)] += 1
            line = original | known | {FAILED: str(error)} if self.keep_failed else None
            return _Done(line, str(error) if isinstance(error, RefusedRewriteError) else "")
        self.results[REWRITTEN] += 1
        return _Done(rewritten._asdict() | {ORIGINAL: original} | known)

    async def _rewritten(self, chat: ChatModel, problem: Problem) -> Problem:
        from deploy.cli.data.rewriting import (
            RefusedRewriteError,
            check_confirmed,
            check_messages,
            read_rewrite,
            rewrite_messages,
        )
        from verifier.remote.faults import ServiceFaultError

        try:
            rewritten = read_rewrite(problem, await chat.ask(rewrite_messages(problem)))
            if self.check:
                check_confirmed(rewritten, await chat.ask(check_messages(problem, rewritten)))
        except ServiceFaultError as fault:
            if fault.blamed:
                raise  # nothing is known of the problem
            raise RefusedRewriteError(f"the model's service refused the request: {fault}") from None
        return rewritten

    @property
    def summary(self) -> str:
        """What happened to the rows, in one line."""
        done = ", ".join(f"{self.results[result]} {result}" for result in (COPIED, REWRITTEN, FAILED))
        shown = self.causes.most_common(MOST_CAUSES)
        rest = self.causes.total() - sum(count for _, count in shown)
        causes = "; ".join([f"{count}: {cause}" for cause, count in shown] + [f"{rest}: other causes"] * bool(rest))
        kept = "kept as they were" if self.keep_failed else "dropped"
        earlier = f"; {self._earlier} were there before" if self._earlier else ""
        return f"{self.results.total()} rows: {done}{f' and {kept} ({causes})' if causes else ''}{earlier}"


async def _end(tasks: Collection[asyncio.Task[_Done]]) -> None:
    """Cancel what is left of a command that ends. Faults of the service are not logged: the command reports one."""
    from services.waits import cancel_and_wait
    from verifier.remote.faults import ServiceFaultError

    def failed(task: asyncio.Task[_Done]) -> bool:
        return task.done() and not task.cancelled() and isinstance(task.exception(), ServiceFaultError)

    await cancel_and_wait(*(task for task in tasks if not failed(task)))
