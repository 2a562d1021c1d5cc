"""An evaluation as those of the public repository are written: a repository, a conversation, a patch."""

import os
from pathlib import Path

from openhands.sdk import Agent, Conversation
from openhands.sdk.workspace import RemoteWorkspace
from openhands.tools.preset.default import get_default_tools
from openhands.workspace import DockerWorkspace

from benchmarks.utils.evaluation import Evaluation
from benchmarks.utils.models import EvalInstance, EvalOutput

COUNT = int(os.environ.get("NOTES_COUNT", "1"))


class NotesEvaluation(Evaluation):
    def prepare_instances(self) -> list[EvalInstance]:
        kinds = self.metadata.details.get("kinds") or [f"finish-{n}" for n in range(COUNT)]
        return [EvalInstance(id=kind, data={"repo": "a/notes", "number": n}) for n, kind in enumerate(kinds)]

    def prepare_workspace(self, instance, resource_factor=1, forward_env=None) -> RemoteWorkspace:
        workspace = DockerWorkspace(
            server_image=f"example.org/agent-server:{instance.id}",
            working_dir="/workspace",
            forward_env=forward_env or [],
        )
        for command in self.metadata.env_setup_commands or []:
            done = workspace.execute_command(command)
            if done.exit_code != 0:
                raise RuntimeError(f"env setup failed: {done.stderr}")
        return workspace

    def evaluate_instance(self, instance, workspace) -> EvalOutput:
        assert isinstance(workspace, RemoteWorkspace)
        agent = Agent(
            llm=self.metadata.llm,
            tools=get_default_tools(enable_browser=False),
            system_prompt_kwargs={"cli_mode": True},
        )
        conversation = Conversation(
            agent=agent,
            workspace=workspace,
            callbacks=[],
            max_iteration_per_run=self.metadata.max_iterations,
            delete_on_close=True,
        )
        place = f"{workspace.working_dir}/notes"
        made = workspace.execute_command(
            f"mkdir -p {place} && cd {place} && git init -q"
            " && git config user.email a@b && git config user.name a"
            " && echo one >notes.txt && git add -A && git commit -qm base"
        )
        assert made.exit_code == 0, made.stderr
        if instance.id.startswith("files"):
            return EvalOutput(instance_id=instance.id, test_result=self.use_files(workspace, place))
        conversation.send_message(f"story {instance.id} in {place}")
        conversation.run(timeout=600)
        if instance.id.startswith("raise"):
            raise RuntimeError("the evaluation is broken")
        if instance.id.startswith("error"):
            return EvalOutput(instance_id=instance.id, test_result={}, error="it says so")
        patch = self.get_patch(workspace)
        return EvalOutput(
            instance_id=instance.id,
            attempt=self.current_attempt,
            test_result={"git_patch": patch, "number": instance.data["number"]},
            instruction=f"story {instance.id}",
            history=list(conversation.state.events),
            metrics=conversation.conversation_stats.get_combined_metrics(),
        )

    def use_files(self, workspace, place: str) -> dict:
        """Use all of the workspace but the conversation."""
        own = Path(self.metadata.eval_output_dir)
        (own / "here.txt").write_text("from here")
        sent = workspace.file_upload(own / "here.txt", f"{place}/there.txt")
        workspace.execute_command("echo more >>notes.txt", cwd=place)
        fetched = workspace.file_download(f"{place}/notes.txt", own / "back" / "notes.txt")
        lost = workspace.file_download(f"{place}/none.txt", own / "none.txt")
        diff = workspace.git_diff(f"{place}/notes.txt")
        slow = workspace.execute_command("sleep 30", timeout=0.2)
        return {
            "sent": sent.success,
            "fetched": fetched.success and (own / "back" / "notes.txt").read_text(),
            "lost": [lost.success, bool(lost.error)],
            "changes": [[change.status.value, str(change.path)] for change in workspace.git_changes("notes")],
            "diff": [diff.original, diff.modified],
            "late": [slow.exit_code, slow.timeout_occurred],
            "status": workspace.execute_command("exit 7").exit_code,
        }

    def get_patch(self, workspace) -> str:
        done = workspace.execute_command(
            f"cd {workspace.working_dir}/notes && git add -A && git diff --cached HEAD"
        )
        assert done.exit_code == 0, done.stderr
        return done.stdout

    def collect_failure_test_result(self, instance, workspace, error):
        return {"git_patch": self.get_patch(workspace), "git_patch_captured_on_error": True}
