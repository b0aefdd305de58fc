"""In-memory ports, whole runs on them and their crashes, and checks of an implementation."""

from sc_core.testing.conformance import ROW_CHECKS as ROW_CHECKS
from sc_core.testing.conformance import Subject as Subject
from sc_core.testing.conformance import snapshot_restores_the_store as snapshot_restores_the_store
from sc_core.testing.crash import Crash as Crash
from sc_core.testing.crash import Exploration as Exploration
from sc_core.testing.crash import Point as Point
from sc_core.testing.crash import Violation as Violation
from sc_core.testing.crash import Watcher as Watcher
from sc_core.testing.crash import World as World
from sc_core.testing.crash import count_points as count_points
from sc_core.testing.crash import explore as explore
from sc_core.testing.crash import replay as replay
from sc_core.testing.data_plane import Call as Call
from sc_core.testing.data_plane import MemoryBootstrap as MemoryBootstrap
from sc_core.testing.data_plane import MemoryDataPlane as MemoryDataPlane
from sc_core.testing.data_plane import MemoryStore as MemoryStore
from sc_core.testing.disk import MemoryDisk as MemoryDisk
from sc_core.testing.events import MemoryEventLog as MemoryEventLog
from sc_core.testing.ports import LeaveOneOut as LeaveOneOut
from sc_core.testing.ports import ListPrompts as ListPrompts
from sc_core.testing.ports import MeanBaseline as MeanBaseline
from sc_core.testing.ports import MemoryEngines as MemoryEngines
from sc_core.testing.ports import MemoryMetrics as MemoryMetrics
from sc_core.testing.ports import MemoryTrainer as MemoryTrainer
from sc_core.testing.run import MemoryRun as MemoryRun
from sc_core.testing.world import MemoryWorld as MemoryWorld
