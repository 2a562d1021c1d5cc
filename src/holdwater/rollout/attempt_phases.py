"""The phases of an attempt: set-up, acting, salvage, grading and scoring. `attempt.py` runs them in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..agent.loader import takes_attempt
from ..core.authoring import CriticInput, ManagedSandbox, SessionStatus
from ..core.environment import GRADING_VARIABLES, fill_templates
from ..core.errors import AgentFailed, DiskFull, GradeFailed, SandboxFailed
from ..core.exchange import GROUP_BORROWER
from ..core.failures import RULES, ScoreRule
from ..core.records import (
    AttemptFailure,
    AttemptPhase,
    FailureOrigin,
    Instance,
    KeptFile,
    KeptWork,
    Limits,
    SandboxSpec,
)
from ..ledger.attempt_files import describe_file
from .attempt_rules import (
    choose_seed,
    describe_left_out,
    find_acting_failure,
    limit_step,
    make_fresh_error,
    next_step,
    prepare_sandbox,
    step_failure,
    worth_grading,
)
from .attempt_services import AttemptPaths, AttemptServices, SegmentLog
from .attempt_state import AttemptState
from .children import ChildSpawner, LentResources, call_agent
from .graded_attempt import open_graded_attempt
from .group import MemberAccess, ScoringResult, WaitingMember
from .user_calls import as_grade, as_patch
from .views import ModelView, SandboxView, adapt_arguments, wait_healthy
from .work_files import check_kept, keep_answer, read_answer, write_kept

CHILD_STRIDE = 1_000_000  # between the seeds of an attempt and of its children


class AttemptRunner:
    """The phases of `run_attempt`, each as one method."""

    def __init__(
        self,
        state: AttemptState,
        services: AttemptServices,
        limits: Limits,
        paths: AttemptPaths,
        log: SegmentLog,
    ) -> None:
        self.state = state
        self.services = services
        self.limits = limits
        self.paths = paths
        self.log = log
        self.session: SessionStatus | None = None
        self.sandbox: ManagedSandbox | None = None
        self.view: SandboxView | None = None
        self.model: ModelView | None = None
        self.agent_view: SandboxView | None = None  # of the sandbox, while the agent acts
        self.dismissed: list[SandboxView | ModelView] = []
        self.patch: str | None = None
        self.over = False  # the agent's time is over
        self.lost = ""  # why the kept work is incomplete; empty: it is complete
        self.steps = 1
        self.failed_step: AttemptFailure | None = None  # of the first step in which the agent failed

    @property
    def peak(self) -> int:
        return self.sandbox.peak_memory if self.sandbox else 0

    @property
    def open_sandbox(self) -> ManagedSandbox:
        assert self.sandbox is not None, "used before set-up"
        return self.sandbox

    async def set_up(self) -> None:
        state, services = self.state, self.services
        attempt, instance = state.job.attempt, state.instance
        if instance.refused:
            raise SandboxFailed(instance.refused, kind="refused", again=False)
        sandbox = services.sandboxes.open(
            attempt.id, self.limits, services.gateway, self._resolve_start(instance.start)
        )
        self.sandbox = state.sandbox = await state.scope.open("sandbox", services.enclose("sandbox", sandbox))
        repeats = bool(state.job.earlier) or (services.fork is not None and state.job.work is None)
        recording = await state.calls.call(services.recording, state.job) if repeats else None
        session = services.open_session(attempt.id, self.log, self.limits, recording)
        self.session = state.session = await state.scope.open(
            "gateway session", services.enclose("session", session)
        )
        self.view, self.model = self.view_sandbox(), self.view_model(self.session, instance)
        await self._furnish(instance, self.view)
        await self.open_sandbox.mark()
        if state.kept is not None:
            await self._put_back(state.kept)
        state.ready = True

    def view_sandbox(self, env: Mapping[str, str] | None = None) -> SandboxView:
        faults, health = self.state.disk_faults, self.state.instance.start.health
        variables, env = self.services.variables, GRADING_VARIABLES if self.over else env or {}
        return SandboxView(self.open_sandbox, self.paths, faults, self._renew, variables, env, health)

    def view_model(self, session: SessionStatus | None, instance: Instance, child: int = 0) -> ModelView:
        model = self.services.model(session, instance.start.network)
        seed = choose_seed(self.state.job.attempt, self.services.fork)
        return ModelView(model, seed=seed + child * CHILD_STRIDE)

    def _resolve_start(self, start: SandboxSpec) -> SandboxSpec:
        """Return the spec with the daemon's image for it, and with its environment variables filled in."""
        image = self.state.job.images.get(start.key, start.image)
        env = fill_templates(start.env, self.services.variables)
        return msgspec.structs.replace(start, image=image, env=env)

    async def _renew(self, start: SandboxSpec | None, view: SandboxView) -> None:
        """Start the sandbox afresh from `start`; None: as the agent found it."""
        instance = self.state.instance
        await self.open_sandbox.renew(self._resolve_start(start or instance.start))
        if start is None:
            await self._furnish(instance, view)
        elif start.health is not None:
            await wait_healthy(view, start.health)

    async def _furnish(self, instance: Instance, sandbox: SandboxView) -> None:
        """Put the instance's files into the sandbox and run its set-up."""
        if instance.start.health is not None:
            await wait_healthy(sandbox, instance.start.health)
        if instance.directory is not None:
            await self.open_sandbox.put(Path(instance.directory), self.open_sandbox.workdir)
        for path, content in instance.files.items():
            await sandbox.write(path, content)
        if instance.setup is not None:
            result = await sandbox.run(instance.setup)
            if not result.ok:
                raise SandboxFailed(
                    f"set-up command exited with {result.exit_code}: {result.output[-500:]}", kind="setup"
                )
        if self.services.suite.setup is not None:
            await self._call(self.services.suite.setup, instance, sandbox)

    def acting_seconds(self) -> float:
        """Return the acting limit, or the working-time limit plus the time spent waiting for a rate limit."""
        if self.limits.working is None:
            return self.limits.acting
        waited = self.session.waited if self.session else 0.0
        return min(self.limits.acting, self.limits.working + waited)

    async def act(self) -> None:
        """Let the agent act, and keep its work. For kept work, take over how the agent ended at that time."""
        state, again = self.state, self.state.kept
        if again is not None:
            state.failure = again.failure
        else:
            state.failure = await state.run_phase(
                AttemptPhase.ACTING, self.acting_seconds, AgentFailed, self._act
            )
            state.failure = find_acting_failure(state.failure or self.failed_step, self.session)
        self.over = True
        self.dismiss()
        if again is None:
            await self.keep()
            await self._freshen()

    async def _act(self) -> None:
        """Call the agent once, or in the steps of the suite."""
        if self.services.suite.step is None:
            await self._act_on(self.state.instance)
        else:
            await self._take_steps(self.services.suite.step)

    async def _act_on(self, instance: Instance) -> None:
        solve = self.services.suite.solve if self.services.agent.solves else None
        if solve is not None:
            self.state.answer = await self._call(solve, instance, self.view)
            return
        self.agent_view = self.view_sandbox(self.services.agent_env)
        agent, views = self.services.agent, (self.agent_view, self.model)
        if not self.services.spawns_children:
            self.state.answer = await call_agent(self.state, agent, instance, views, None)
            return
        async with self.state.scope.inner() as scope:
            children = await scope.open("children", ChildSpawner(self, LentResources(instance, self.session)))
            self.state.answer = await call_agent(self.state, agent, instance, views, children)

    async def _take_steps(self, step: Callable[..., Any]) -> None:
        """Run the agent's steps. Between them, code that it left running reaches neither sandbox nor model.

        A step that fails or exceeds its time is graded as it is: the suite decides on the next step.
        """
        state, number = self.state, 0
        while instance := await next_step(self._call, step, state.instance, self.view, state.answer, number):
            assert self.view is not None
            self.steps = number + 1
            await prepare_sandbox(instance, self.open_sandbox, self.view)
            self.model = self.view_model(self.session, instance)
            try:
                async with limit_step(instance, state):
                    await self._act_on(instance)
            except Exception as error:  # boundary: raised again, unless the next step follows
                failure = step_failure(error, self.session)
                if failure is None:
                    raise
                self.failed_step = self.failed_step or failure
            self.dismiss()
            for view in self.dismissed:
                await view.wait_quiet()
            number += 1

    async def _put_back(self, kept: KeptWork) -> None:
        """Restore the work of an earlier attempt. A kept file that has changed is not graded: it raises."""
        state, paths = self.state, self.paths
        await check_kept(state, paths, kept)
        if kept.patch is not None:
            content = await state.calls.call(paths.kept_file(kept.patch.name).read_bytes)
            self.patch = content.decode("utf-8", "surrogateescape")
        elif kept.salvage is not None:
            await self.open_sandbox.restore(paths.kept_file(kept.salvage.name))
        await read_answer(state, paths, kept)
        await self._keep_patch()

    def dismiss(self) -> None:
        """End the agent's views: code that it left running reaches neither the sandbox nor the model."""
        self.end()
        self.dismissed = [view for view in (self.view, self.agent_view, self.model) if view is not None]
        self.view, self.agent_view = self.view_sandbox(), None

    async def keep(self) -> None:
        """Keep the agent's work; a failure becomes an event and changes no verdict."""
        state, acting = self.state, self.state.failure
        kept = KeptWork(attempt=state.job.attempt.id, failure=acting, steps=self.steps)

        async def salvage() -> None:
            nonlocal kept
            for view in self.dismissed:
                await view.wait_quiet()
            with state.disk_faults.watch():
                answer, lacks = await keep_answer(state, self.paths)
                patch = await self._keep_patch()
                state.salvage = await self.open_sandbox.salvage(self.paths.salvage())
                kept = msgspec.structs.replace(kept, patch=patch, answer=answer)
                if state.salvage is not None:
                    described = await state.calls.call(describe_file, self.paths.salvage())
                    kept = msgspec.structs.replace(kept, salvage=described)
            if patch is None:  # with a patch, grading needs nothing else
                lacks, outside = lacks or describe_left_out(state.salvage), self.open_sandbox.outside
                kept = msgspec.structs.replace(kept, lacks=lacks, outside=outside)

        failure = await state.run_phase(
            AttemptPhase.SALVAGE, lambda: self.services.salvage_seconds, SandboxFailed, salvage
        )
        if failure is not None and failure.where is FailureOrigin.INTERRUPTED:
            state.failure = state.failure or failure
        elif failure is not None:
            state.note("salvage.failed", failure.message)
        lost = "" if failure is None else f"it could not be kept: {failure.message}"
        self.lost = lost or describe_left_out(state.salvage)
        state.kept = msgspec.structs.replace(kept, lacks=lost or kept.lacks)

    async def _freshen(self) -> None:
        """Remove everything of the agent but its work, if the suite wants that."""
        state = self.state
        if not state.ready or not worth_grading(state.failure):
            return

        async def clear() -> None:
            with state.disk_faults.watch():
                if await self.open_sandbox.clear_outside() or not self.services.suite.fresh:
                    return
                if self.lost:
                    raise make_fresh_error(self.lost)
                assert self.view is not None
                await self._renew(None, self.view)
                if state.salvage is not None:
                    await self.open_sandbox.restore(self.paths.salvage())

        failure = await state.run_phase(AttemptPhase.GRADING, lambda: self.limits.setup, GradeFailed, clear)
        if failure is not None:
            state.ready = False  # no grading beside other files of the agent
            self._set_grade_failure(failure)

    async def _keep_patch(self) -> KeptFile | None:
        """Write the work as a patch to disk, before it is graded; return the file."""
        take = self.services.suite.patch
        if take is None or self.patch is not None:
            return None
        self.patch = as_patch(await self._call(take, self.state.instance, self.view, self.state.answer))
        content = self.patch.encode("utf-8", "surrogateescape")
        self.state.patch = len(content)
        return await write_kept(self.state, self.paths.patch(), content)

    async def ask_critic(self, *, before: bool) -> None:
        """Run a critic of the user's own, `before` grading or after it. Its failure changes no verdict."""
        critic, state = self.services.critic, self.state
        if critic is None or critic.before != before or not worth_grading(state.failure):
            return
        answer, grade, usage = state.answer, state.grade, state.agent_usage
        tried = CriticInput(answer=answer, patch=self.patch, failure=state.failure, grade=grade, usage=usage)

        async def consult() -> None:
            state.critic_satisfied = False  # until the critic returns
            state.critic_satisfied = await critic.satisfied(self._call, state.instance, self.view, tried)

        failure = await state.run_phase(
            AttemptPhase.GRADING, lambda: self.limits.grading, GradeFailed, consult
        )
        if failure is not None and failure.where is FailureOrigin.INTERRUPTED:
            state.failure = failure
        elif failure is not None:
            state.note("critic.failed", failure.message)

    async def judge(self) -> None:
        """Grade the work. A failed grading replaces an earlier failure that would be scored."""
        if not worth_grading(self.state.failure):
            return
        failure = await self.state.run_phase(
            AttemptPhase.GRADING, lambda: self.limits.grading, GradeFailed, self._grade
        )
        if failure is not None:
            self._set_grade_failure(failure)

    def _set_grade_failure(self, failure: AttemptFailure) -> None:
        """Set the reason for the missing grade; an earlier failure stays if it would not be scored anyway."""
        earlier = self.state.failure
        if earlier is None or RULES[earlier.where].scored is ScoreRule.YES:
            self.state.failure = failure

    async def _grade(self) -> None:
        grade = self.services.suite.grade
        if grade is None:
            raise GradeFailed(
                f"suite `{self.services.suite.name}` has no grade function", kind="missing", again=False
            )
        if self.services.suite.patch is not None and self.patch is None:
            raise GradeFailed("the agent's work could not be taken as a patch", kind="patch")
        work = self.state.answer if self.patch is None else self.patch
        if takes_attempt(grade):
            async with open_graded_attempt(self, self.session) as attempt:
                *arguments, own = adapt_arguments(grade, self.state.instance, self.view, work, attempt)
                result = await self.state.calls.call(grade, *arguments, attempt=own)
        else:
            result = await self._call(grade, self.state.instance, self.view, work)
        self.state.grade = as_grade(result)

    async def score(self) -> None:
        """Wait, with sandbox and session open, until the group is scored. On failure there is no grade."""
        state, settled = self.state, ScoringResult()

        async def wait() -> None:
            nonlocal settled
            settled = await self._wait_scored()

        failure = await state.run_phase(AttemptPhase.SCORING, None, GradeFailed, wait) or settled.failure
        if failure is not None:
            state.failure, state.grade = failure, None
        else:
            state.group_scored, state.grade = settled.group_scored, settled.grade or state.grade

    async def _wait_scored(self) -> ScoringResult:
        state, services = self.state, self.services
        assert self.view is not None
        async with state.scope.inner() as scope:
            session = self.session
            if session is not None:  # to distinguish the hook's calls from the agent's
                session = await scope.open("group session", services.lend(session, GROUP_BORROWER))
            self.model = self.view_model(session, state.instance)
            loan = LentResources(state.instance, self.session)
            children = await scope.open("children", ChildSpawner(self, loan))
            access = MemberAccess(state, children, services)
            member = WaitingMember(access, self.view, self.model, self.limits.grading)
            await scope.open("group", services.groups.join_group(member))
            return await member.wait_scored()

    async def sync(self) -> None:
        """Make the exchanges durable."""
        try:
            with self.state.disk_faults.watch():
                if self.log.count:
                    await self.state.calls.call(self.log.sync)
        except DiskFull:
            pass  # `disk_faults` has recorded it

    def end(self) -> None:
        for view in (self.view, self.agent_view, self.model):
            if view is not None:
                view.end()

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self.state.calls.call(function, *adapt_arguments(function, *arguments))
