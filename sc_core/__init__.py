"""The controller core of asynchronous RL post-training, with structured concurrency.

Start with `SingleController`; `sc_core.testing` runs a whole one in memory.
"""

from sc_core.audit import AuditReport as AuditReport
from sc_core.audit import audit as audit
from sc_core.audit import audit_run as audit_run
from sc_core.barrier import BarrierStatistics as BarrierStatistics
from sc_core.barrier import CheckpointBarrier as CheckpointBarrier
from sc_core.bundle import BundleStore as BundleStore
from sc_core.calls import in_thread as in_thread
from sc_core.calls import inline as inline
from sc_core.calls import settle as settle
from sc_core.client_store import ClientStore as ClientStore
from sc_core.clients import AsyncClient as AsyncClient
from sc_core.clients import FieldsCodec as FieldsCodec
from sc_core.clients import PlainFields as PlainFields
from sc_core.clients import SyncClient as SyncClient
from sc_core.clients import ThreadedClient as ThreadedClient
from sc_core.config import AsyncRlConfig as AsyncRlConfig
from sc_core.config import CheckpointingConfig as CheckpointingConfig
from sc_core.config import ControllerConfig as ControllerConfig
from sc_core.config import DeadlinesConfig as DeadlinesConfig
from sc_core.config import GenerationFleetHealthConfig as GenerationFleetHealthConfig
from sc_core.config import GrpoConfig as GrpoConfig
from sc_core.config import RolloutFailureConfig as RolloutFailureConfig
from sc_core.config import RolloutRecoveryConfig as RolloutRecoveryConfig
from sc_core.config import SamplerConfig as SamplerConfig
from sc_core.config import StallWatchdogConfig as StallWatchdogConfig
from sc_core.config import check_keys as check_keys
from sc_core.config import decode as decode
from sc_core.controller import ControllerStatistics as ControllerStatistics
from sc_core.controller import Ports as Ports
from sc_core.controller import RunResult as RunResult
from sc_core.controller import SingleController as SingleController
from sc_core.defaults import GroupAdvantages as GroupAdvantages
from sc_core.defaults import PromptList as PromptList
from sc_core.defaults import SharedWeights as SharedWeights
from sc_core.difference import Difference as Difference
from sc_core.disk import LOCAL as LOCAL
from sc_core.disk import DiskLock as DiskLock
from sc_core.embedding import RowStore as RowStore
from sc_core.embedding import open_run as open_run
from sc_core.errors import BarrierMisuse as BarrierMisuse
from sc_core.errors import BarrierTimeout as BarrierTimeout
from sc_core.errors import BundleDamaged as BundleDamaged
from sc_core.errors import BundleInconsistent as BundleInconsistent
from sc_core.errors import CallCancelled as CallCancelled
from sc_core.errors import CallFailed as CallFailed
from sc_core.errors import CallTimeout as CallTimeout
from sc_core.errors import CannotShow as CannotShow
from sc_core.errors import ConfigChanged as ConfigChanged
from sc_core.errors import ConfigError as ConfigError
from sc_core.errors import Conservation as Conservation
from sc_core.errors import DataFailure as DataFailure
from sc_core.errors import DataPlaneError as DataPlaneError
from sc_core.errors import EndOfPrompts as EndOfPrompts
from sc_core.errors import EnginesFailed as EnginesFailed
from sc_core.errors import EstimatorError as EstimatorError
from sc_core.errors import InventoryMismatch as InventoryMismatch
from sc_core.errors import MissingRows as MissingRows
from sc_core.errors import NoValidBundle as NoValidBundle
from sc_core.errors import PlaceAlreadyHeld as PlaceAlreadyHeld
from sc_core.errors import PlaceNotHeld as PlaceNotHeld
from sc_core.errors import PromptDropped as PromptDropped
from sc_core.errors import RestoreError as RestoreError
from sc_core.errors import RestoreOrderError as RestoreOrderError
from sc_core.errors import RolloutError as RolloutError
from sc_core.errors import RowsNotCleared as RowsNotCleared
from sc_core.errors import RunInUse as RunInUse
from sc_core.errors import SaveError as SaveError
from sc_core.errors import ScError as ScError
from sc_core.errors import StallError as StallError
from sc_core.errors import StopTimeout as StopTimeout
from sc_core.errors import TooManyDropped as TooManyDropped
from sc_core.errors import TooManyFiltered as TooManyFiltered
from sc_core.errors import WeightSyncError as WeightSyncError
from sc_core.errors import WorkerDied as WorkerDied
from sc_core.errors import WrongAnswer as WrongAnswer
from sc_core.errors import root_cause as root_cause
from sc_core.estimates import check_scope as check_scope
from sc_core.events import JsonlEventLog as JsonlEventLog
from sc_core.events import JsonlMetrics as JsonlMetrics
from sc_core.filters import ZeroVarianceFilter as ZeroVarianceFilter
from sc_core.places import Places as Places
from sc_core.ports import AdvantageEstimator as AdvantageEstimator
from sc_core.ports import BootstrapDataPlane as BootstrapDataPlane
from sc_core.ports import Columns as Columns
from sc_core.ports import DataPlane as DataPlane
from sc_core.ports import EngineFleet as EngineFleet
from sc_core.ports import EngineState as EngineState
from sc_core.ports import EstimatorScope as EstimatorScope
from sc_core.ports import EventSink as EventSink
from sc_core.ports import GroupFilter as GroupFilter
from sc_core.ports import IndexView as IndexView
from sc_core.ports import MetricsSink as MetricsSink
from sc_core.ports import PromptSource as PromptSource
from sc_core.ports import RolloutWorker as RolloutWorker
from sc_core.ports import Runner as Runner
from sc_core.ports import Sampler as Sampler
from sc_core.ports import SamplerView as SamplerView
from sc_core.ports import SpanSink as SpanSink
from sc_core.ports import Trainer as Trainer
from sc_core.ports import ValidationPrompts as ValidationPrompts
from sc_core.ports import WeightSync as WeightSync
from sc_core.records import Batch as Batch
from sc_core.records import Cut as Cut
from sc_core.records import Group as Group
from sc_core.records import GroupId as GroupId
from sc_core.records import LedgerRecord as LedgerRecord
from sc_core.records import Prompt as Prompt
from sc_core.records import PulledPrompt as PulledPrompt
from sc_core.records import Sample as Sample
from sc_core.records import SampleId as SampleId
from sc_core.records import Stamp as Stamp
from sc_core.replay import ReplayReport as ReplayReport
from sc_core.replay import replay as replay
from sc_core.replay import replay_run as replay_run
from sc_core.report import StallReport as StallReport
from sc_core.restore import ReadyStore as ReadyStore
from sc_core.restore import SentStore as SentStore
from sc_core.restore import check_config as check_config
from sc_core.restore import check_resume as check_resume
from sc_core.restore import check_store as check_store
from sc_core.restore import choose_bundle as choose_bundle
from sc_core.restore import restore as restore
from sc_core.returned import check_put as check_put
from sc_core.samplers import build_sampler as build_sampler
from sc_core.samplers import check_capacity as check_capacity
from sc_core.seeing import write_report as write_report
from sc_core.seeing import write_trace as write_trace
from sc_core.spans import JsonlSpans as JsonlSpans
from sc_core.step_trainer import StepTrainer as StepTrainer
from sc_core.verify import VerifiedBundle as VerifiedBundle
from sc_core.verify import candidates as candidates
from sc_core.verify import newest_valid as newest_valid
from sc_core.verify import verify as verify
from sc_core.watched import Watched as Watched
from sc_core.weights import TurnGate as TurnGate

__version__ = "0.1.0"

__all__ = [
    "AdvantageEstimator",
    "AsyncClient",
    "AsyncRlConfig",
    "AuditReport",
    "BarrierMisuse",
    "BarrierStatistics",
    "BarrierTimeout",
    "Batch",
    "BootstrapDataPlane",
    "BundleDamaged",
    "BundleInconsistent",
    "BundleStore",
    "CallCancelled",
    "CallFailed",
    "CallTimeout",
    "CannotShow",
    "CheckpointBarrier",
    "CheckpointingConfig",
    "ClientStore",
    "Columns",
    "ConfigChanged",
    "ConfigError",
    "Conservation",
    "ControllerConfig",
    "ControllerStatistics",
    "Cut",
    "DataFailure",
    "DataPlane",
    "DataPlaneError",
    "DeadlinesConfig",
    "Difference",
    "DiskLock",
    "EndOfPrompts",
    "EngineFleet",
    "EngineState",
    "EnginesFailed",
    "EstimatorError",
    "EstimatorScope",
    "EventSink",
    "FieldsCodec",
    "GenerationFleetHealthConfig",
    "Group",
    "GroupAdvantages",
    "GroupFilter",
    "GroupId",
    "GrpoConfig",
    "IndexView",
    "InventoryMismatch",
    "JsonlEventLog",
    "JsonlMetrics",
    "JsonlSpans",
    "LOCAL",
    "LedgerRecord",
    "MetricsSink",
    "MissingRows",
    "NoValidBundle",
    "PlaceAlreadyHeld",
    "PlaceNotHeld",
    "Places",
    "PlainFields",
    "Ports",
    "Prompt",
    "PromptDropped",
    "PromptList",
    "PromptSource",
    "PulledPrompt",
    "ReadyStore",
    "ReplayReport",
    "RestoreError",
    "RestoreOrderError",
    "RolloutError",
    "RolloutFailureConfig",
    "RolloutRecoveryConfig",
    "RolloutWorker",
    "RowStore",
    "RowsNotCleared",
    "RunInUse",
    "RunResult",
    "Runner",
    "Sample",
    "SampleId",
    "Sampler",
    "SamplerConfig",
    "SamplerView",
    "SaveError",
    "ScError",
    "SentStore",
    "SharedWeights",
    "SingleController",
    "SpanSink",
    "StallError",
    "StallReport",
    "StallWatchdogConfig",
    "Stamp",
    "StepTrainer",
    "StopTimeout",
    "SyncClient",
    "ThreadedClient",
    "TooManyDropped",
    "TooManyFiltered",
    "Trainer",
    "TurnGate",
    "ValidationPrompts",
    "VerifiedBundle",
    "Watched",
    "WeightSync",
    "WeightSyncError",
    "WorkerDied",
    "WrongAnswer",
    "ZeroVarianceFilter",
    "audit",
    "audit_run",
    "build_sampler",
    "candidates",
    "check_capacity",
    "check_config",
    "check_keys",
    "check_put",
    "check_resume",
    "check_scope",
    "check_store",
    "choose_bundle",
    "decode",
    "in_thread",
    "inline",
    "newest_valid",
    "open_run",
    "replay",
    "replay_run",
    "restore",
    "root_cause",
    "settle",
    "verify",
    "write_report",
    "write_trace",
]
