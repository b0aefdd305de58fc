"""In-memory ports, and suites that check any implementation of a port."""

from sc_core.testing.data_plane import Call as Call
from sc_core.testing.data_plane import MemoryBootstrap as MemoryBootstrap
from sc_core.testing.data_plane import MemoryDataPlane as MemoryDataPlane
from sc_core.testing.data_plane import MemoryStore as MemoryStore
