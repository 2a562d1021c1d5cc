"""The life of one attempt: set-up, acting, salvage, grading, closing, and one verdict whatever happens.

`live` is the story; `life.Life` remembers what has happened so far. What surrounds it is a `place.Place`.
A member of a group waits for the others before it closes: `group.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..core.authoring import KeptSandbox, Session, Tried
from ..core.errors import AgentFailed, DiskFull, GradeFailed, RunFailed, SandboxFailed, as_failure
from ..core.failures import RULES, Scored, disk_full
from ..core.policy import stands
from ..core.records import Failure, Instance, KeptFile, KeptWork, Limits, Phase, Start, Verdict, Where
from ..core.variables import GRADING, filled
from ..ledger.disk import no_space
from ..ledger.files import describe_file
from .children import Children, Means, act
from .ends import in_doubt, leased, left_out, model_first, unfresh, unwritable, worth_grading
from .foreign import as_grade, as_patch
from .group import Member, Reach, Settled
from .health import healthy
from .keeping import check_kept, keep_answer, read_answer, write_kept
from .life import Life
from .logs import attempt_log
from .place import Log, Paths, Place
from .steps import make_ready, next_step, own_limit, step_failure
from .views import ModelView, SandboxView, for_caller

SEEDS = 1_000_000  # between the seeds of an attempt and of its children
GROUP = "group"  # by whom a group hook's own model calls are recorded


async def live(life: Life, place: Place) -> Verdict:
    """Live the attempt to its verdict. Every exchange is on disk when this returns."""
    attempt, instance = life.job.attempt, life.instance
    limits = place.limits.under(instance.limits)
    if life.job.offer is not None:
        limits = limits.under(life.job.offer.limits)
    limits = leased(limits.scaled(attempt.scale), life.job)
    paths = place.paths(attempt.id, instance.id)
    log = place.exchanges(attempt.id)
    befallen = place.watch_surroundings()
    work = _Work(life, place, limits, paths, log)
    try:
        with attempt_log(paths.log) as sink:
            async with life.scope:
                life.failure = await life.stage(Phase.SETUP, lambda: limits.setup, SandboxFailed, work.set_up)
                if life.failure is None:
                    await work.act()
                if life.ready:
                    await work.ask(before=True)
                    await work.judge()
                    await work.ask(before=False)
                if attempt.group is not None and stands(life.failure, life.grade):
                    await work.score()
                work.end()
                cause = befallen()  # looked at before the sandbox gives its room back
                life.phase = Phase.CLOSING
        for left in work.sandbox.leftovers if work.sandbox else ():
            life.note("sandbox.leftover", left)
        if work.session is not None and work.session.drifted:
            drift = await life.calls.call(place.describe_drift, attempt.id, work.session.drifts)
            life.note(
                "replay.drifted", f"{work.session.drifted} requests differ from the recorded ones: {drift}"
            )
        if life.brood.dropped:
            life.note("children.dropped", f"the verdict does not tell of {life.brood.dropped} children")
        await work.sync()
        cause = cause or befallen()
        if life.found_full or no_space(sink.error):
            life.failure = disk_full()
        elif cause is not None and in_doubt(life.failure, life.grade):
            life.failure = cause
        elif sink.error is not None:
            life.failure = as_failure(unwritable(sink.error), RunFailed, life.phase)
    finally:
        log.close()
    return life.verdict(place.token, work.session, log.count, work.peak)


class _Work:
    """The stages of `live`, each as one method."""

    def __init__(self, life: Life, place: Place, limits: Limits, paths: Paths, log: Log) -> None:
        self.life = life
        self.place = place
        self.limits = limits
        self.paths = paths
        self.log = log
        self.session: Session | None = None
        self.sandbox: KeptSandbox | None = None
        self.view: SandboxView | None = None
        self.model: ModelView | None = None
        self.dismissed: list[SandboxView | ModelView] = []
        self.patch: str | None = None
        self.over = False  # the agent's time
        self.lost = ""  # why what was kept is not all of the work
        self.steps = 1
        self.failed_step: Failure | None = None  # of the first step in which the agent failed

    @property
    def peak(self) -> int:
        return self.sandbox.peak_memory if self.sandbox else 0

    @property
    def opened(self) -> KeptSandbox:
        assert self.sandbox is not None, "used before set-up"
        return self.sandbox

    async def set_up(self) -> None:
        life, place = self.life, self.place
        attempt, instance = life.job.attempt, life.instance
        if instance.refused:
            raise SandboxFailed(instance.refused, kind="refused", again=False)
        sandbox = place.sandboxes.open(attempt.id, self.limits, place.gateway, self._at(instance.start))
        self.sandbox = life.sandbox = await life.scope.open("sandbox", place.enclose("sandbox", sandbox))
        earlier = life.job.earlier
        recording = await life.calls.call(place.recording, earlier) if earlier else None
        session = place.session(attempt.id, self.log, self.limits, recording)
        self.session = life.session = await life.scope.open(
            "gateway session", place.enclose("session", session)
        )
        self.view = self.seen()
        self.model = self.modelled(self.session, instance)
        await self._furnish(instance, self.view)
        await self.opened.mark()
        if life.kept is not None:
            await self._put_back(life.kept)
        life.ready = True

    def seen(self) -> SandboxView:
        hurt, health = self.life.hurt, self.life.instance.start.health
        variables, env = self.place.variables, GRADING if self.over else {}
        return SandboxView(self.opened, self.paths, hurt, self._renew, variables, env, health)

    def modelled(self, session: Session | None, instance: Instance, child: int = 0) -> ModelView:
        attempt = self.life.job.attempt
        model = self.place.model(session, instance.start.network)
        return ModelView(model, seed=attempt.sample * 1000 + attempt.round + child * SEEDS)

    def _at(self, start: Start) -> Start:
        """The same with the image that is there for it, and what its environment asks for."""
        image = self.life.job.images.get(start.key, start.image)
        env = filled(start.env, self.place.variables)
        return msgspec.structs.replace(start, image=image, env=env)

    async def _renew(self, start: Start | None, view: SandboxView) -> None:
        """The sandbox from the beginning: as the agent found it, where nothing else is said."""
        instance = self.life.instance
        await self.opened.renew(self._at(start or instance.start))
        if start is None:
            await self._furnish(instance, view)
        elif start.health is not None:
            await healthy(view, start.health)

    async def _furnish(self, instance: Instance, sandbox: SandboxView) -> None:
        """Put into the sandbox what the instance comes with."""
        if instance.start.health is not None:
            await healthy(sandbox, instance.start.health)
        if instance.directory is not None:
            await self.opened.put(Path(instance.directory), self.opened.workdir)
        for path, content in instance.files.items():
            await sandbox.write(path, content)
        if instance.setup is not None:
            result = await sandbox.run(instance.setup)
            if not result.ok:
                raise SandboxFailed(
                    f"set-up command exited with {result.exit_code}: {result.output[-500:]}", kind="setup"
                )
        if self.place.suite.setup is not None:
            await self._call(self.place.suite.setup, instance, sandbox)

    def acting_seconds(self) -> float:
        """The acting limit, or the working-time limit plus what was spent waiting for a rate limit."""
        if self.limits.working is None:
            return self.limits.acting
        waited = self.session.waited if self.session else 0.0
        return min(self.limits.acting, self.limits.working + waited)

    async def act(self) -> None:
        """The agent's time, and what it left; over kept work that is past, and ended as it did then."""
        life, again = self.life, self.life.kept
        if again is not None:
            life.failure = again.failure
        else:
            life.failure = await life.stage(Phase.ACTING, self.acting_seconds, AgentFailed, self._act)
            life.failure = model_first(life.failure or self.failed_step, self.session)
        self.over = True
        self.dismiss()
        if again is None:
            await self.keep()
            await self._freshen()

    async def _act(self) -> None:
        """In steps, or in one."""
        if self.place.suite.step is None:
            await self._act_on(self.life.instance)
        else:
            await self._take_steps(self.place.suite.step)

    async def _act_on(self, instance: Instance) -> None:
        solve = self.place.suite.solve if self.place.agent.solves else None
        if solve is not None:
            self.life.answer = await self._call(solve, instance, self.view)
            return
        agent, views = self.place.agent, (self.view, self.model)
        if not self.place.parental:
            self.life.answer = await act(self.life, agent, instance, views, None)
            return
        async with self.life.scope.inner() as scope:
            children = await scope.open("children", Children(self, Means(instance, self.session)))
            self.life.answer = await act(self.life, agent, instance, views, children)

    async def _take_steps(self, step: Callable[..., Any]) -> None:
        """The agent's steps; between them what is left of it reaches neither sandbox nor model.

        A step in which the agent fails, or that is late, is judged as it stands: the suite says what follows.
        """
        life, number = self.life, 0
        while instance := await next_step(self._call, step, life.instance, self.view, life.answer, number):
            assert self.view is not None
            self.steps = number + 1
            await make_ready(instance, self.opened, self.view)
            self.model = self.modelled(self.session, instance)
            try:
                async with own_limit(instance):
                    await self._act_on(instance)
            except Exception as error:  # boundary: raised again, unless the next step follows
                failure = step_failure(error, self.session)
                if failure is None:
                    raise
                self.failed_step = self.failed_step or failure
            self.dismiss()
            for view in self.dismissed:
                await view.quiet()
            number += 1

    async def _put_back(self, kept: KeptWork) -> None:
        """Put the work of an earlier attempt into the sandbox; what is not as it was kept is not graded."""
        life, paths = self.life, self.paths
        await check_kept(life, paths, kept)
        if kept.patch is not None:
            content = await life.calls.call(paths.kept(kept.patch.name).read_bytes)
            self.patch = content.decode("utf-8", "surrogateescape")
        elif kept.salvage is not None:
            await self.opened.restore(paths.kept(kept.salvage.name))
        await read_answer(life, paths, kept)
        await self._keep_patch()

    def dismiss(self) -> None:
        """The agent's time is over: what is left of it reaches neither the sandbox nor the model."""
        self.end()
        self.dismissed = [view for view in (self.view, self.model) if view is not None]
        self.view = self.seen()

    async def keep(self) -> None:
        """Keep what the agent left; a failure is an event and changes no verdict."""
        life, acting = self.life, self.life.failure
        kept = KeptWork(attempt=life.job.attempt.id, failure=acting, steps=self.steps)

        async def salvage() -> None:
            nonlocal kept
            for view in self.dismissed:
                await view.quiet()
            with life.hurt.noticed():
                answer, lacks = await keep_answer(life, self.paths)
                patch = await self._keep_patch()
                life.salvage = await self.opened.salvage(self.paths.salvage())
                kept = msgspec.structs.replace(kept, patch=patch, answer=answer)
                if life.salvage is not None:
                    described = await life.calls.call(describe_file, self.paths.salvage())
                    kept = msgspec.structs.replace(kept, salvage=described)
            if patch is None:  # a patch is all that its grading needs
                lacks, outside = lacks or left_out(life.salvage), self.opened.outside
                kept = msgspec.structs.replace(kept, lacks=lacks, outside=outside)

        failure = await life.stage(Phase.SALVAGE, lambda: self.place.salvaging, SandboxFailed, salvage)
        if failure is not None and failure.where is Where.INTERRUPTED:
            life.failure = life.failure or failure
        elif failure is not None:
            life.note("salvage.failed", failure.message)
        lost = "" if failure is None else f"it could not be kept: {failure.message}"
        self.lost = lost or left_out(life.salvage)
        life.kept = msgspec.structs.replace(kept, lacks=lost or kept.lacks)

    async def _freshen(self) -> None:
        """Leave nothing of the agent's but its work, as far as the suite wants that."""
        life = self.life
        if not life.ready or not worth_grading(life.failure):
            return

        async def clear() -> None:
            with life.hurt.noticed():
                if await self.opened.clear_outside() or not self.place.suite.fresh:
                    return
                if self.lost:
                    raise unfresh(self.lost)
                assert self.view is not None
                await self._renew(None, self.view)
                if life.salvage is not None:
                    await self.opened.restore(self.paths.salvage())

        failure = await life.stage(Phase.GRADING, lambda: self.limits.setup, GradeFailed, clear)
        if failure is not None:
            life.ready = False  # nothing is graded beside what else the agent left
            self._spoil(failure)

    async def _keep_patch(self) -> KeptFile | None:
        """The work as a patch, on disk before it is graded."""
        take = self.place.suite.patch
        if take is None or self.patch is not None:
            return None
        self.patch = as_patch(await self._call(take, self.life.instance, self.view, self.life.answer))
        content = self.patch.encode("utf-8", "surrogateescape")
        self.life.patch = len(content)
        return await write_kept(self.life, self.paths.patch(), content)

    async def ask(self, *, before: bool) -> None:
        """Ask a critic of the user's own, `before` grading or after it; that it fails changes no verdict."""
        critic, life = self.place.critic, self.life
        if critic is None or critic.before != before or not worth_grading(life.failure):
            return
        answer, grade, usage = life.answer, life.grade, life.used_by_agent
        tried = Tried(answer=answer, patch=self.patch, failure=life.failure, grade=grade, usage=usage)

        async def asked() -> None:
            life.enough = False  # until it says otherwise
            life.enough = await critic.satisfied(self._call, life.instance, self.view, tried)

        failure = await life.stage(Phase.GRADING, lambda: self.limits.grading, GradeFailed, asked)
        if failure is not None and failure.where is Where.INTERRUPTED:
            life.failure = failure
        elif failure is not None:
            life.note("critic.failed", failure.message)

    async def judge(self) -> None:
        """Grade what is there. A grade that could not be had hides a failure that would be scored."""
        if not worth_grading(self.life.failure):
            return
        failure = await self.life.stage(Phase.GRADING, lambda: self.limits.grading, GradeFailed, self._grade)
        if failure is not None:
            self._spoil(failure)

    def _spoil(self, failure: Failure) -> None:
        """There is no grade for this reason; an earlier failure stays if it would not be scored anyway."""
        earlier = self.life.failure
        if earlier is None or RULES[earlier.where].scored is Scored.YES:
            self.life.failure = failure

    async def _grade(self) -> None:
        grade = self.place.suite.grade
        if grade is None:
            raise GradeFailed(
                f"suite `{self.place.suite.name}` has no grade function", kind="missing", again=False
            )
        if self.place.suite.patch is not None and self.patch is None:
            raise GradeFailed("the agent's work could not be taken as a patch", kind="patch")
        work = self.life.answer if self.patch is None else self.patch
        result = await self._call(grade, self.life.instance, self.view, work)
        self.life.grade = as_grade(result)

    async def score(self) -> None:
        """Wait, with everything alive, until the group is scored. Failing that, there is no grade."""
        life, settled = self.life, Settled()

        async def wait() -> None:
            nonlocal settled
            settled = await self._be_scored()

        failure = await life.stage(Phase.SCORING, None, GradeFailed, wait) or settled.failure
        if failure is not None:
            life.failure, life.grade = failure, None
        else:
            life.together, life.grade = settled.together, settled.grade or life.grade

    async def _be_scored(self) -> Settled:
        life, place = self.life, self.place
        assert self.view is not None
        async with life.scope.inner() as scope:
            session = self.session
            if session is not None:  # so that the hook's calls are told from the agent's
                session = await scope.open("group session", place.lend(session, GROUP))
            self.model = self.modelled(session, life.instance)
            children = await scope.open("children", Children(self, Means(life.instance, self.session)))
            reach = Reach(life, children, partial(place.trajectory, life.acted))
            member = Member(reach, self.view, self.model, self.limits.grading)
            await scope.open("group", place.groups.joined(member))
            return await member.settled()

    async def sync(self) -> None:
        """Make the exchanges last."""
        try:
            with self.life.hurt.noticed():
                if self.log.count:
                    await self.life.calls.call(self.log.sync)
        except DiskFull:
            pass  # it is noticed

    def end(self) -> None:
        for view in (self.view, self.model):
            if view is not None:
                view.end()

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self.life.calls.call(function, *for_caller(function, *arguments))
