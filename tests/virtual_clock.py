"""The loop of the tests that run on asyncio."""

from sc_core.testing.schedule import VirtualClockLoop as VirtualClockLoop
