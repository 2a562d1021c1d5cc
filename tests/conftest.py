"""What holds for every test."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")  # an example that takes long is no failure: the machine may be busy

# A shell without job control starts its background jobs with these ignored, and programs that tests start
# would inherit that. A handler is not inherited, and this process stays as deaf as before.
for number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)
