"""The agent `openhands-sdk`: conversations of the OpenHands SDK, many in one worker or each in its sandbox.

The SDK is no dependency of holdwater. A worker imports it from the user's environment; in a sandbox an
interpreter of the user's choice does.
"""

from .evaluation import openhands_evaluation
from .sdk_agent import openhands_sdk

__all__ = ["openhands_evaluation", "openhands_sdk"]
