"""A server of OpenEnv with a small environment: two guesses, each worth 0.5. It prints its URL."""

import asyncio
import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    colour: str


class Hint(Observation):
    hint: str


class ColourEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **options):
        self._state = State(step_count=0)
        return Hint(hint="the sky", done=False, reward=None)

    def step(self, action, timeout_s=None, **options):
        self._state.step_count += 1
        right = action.colour == "blue"
        return Hint(hint="the sea", done=self._state.step_count == 2, reward=0.5 * right)

    @property
    def state(self):
        return self._state


async def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(create_fastapi_app(ColourEnvironment, Guess, Hint), log_level="error")
    )
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await server.serve(sockets=[listener])


if __name__ == "__main__":
    asyncio.run(main())
