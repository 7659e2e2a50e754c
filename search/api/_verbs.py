"""The function of every use case."""

from __future__ import annotations

from moevolve._asking import function_of, watched
from moevolve.search.interface.answers import AnswersRequest, PromptsRequest
from moevolve.search.interface.checkpoints.export import ExportRequest
from moevolve.search.interface.checkpoints.import_eep import ImportEepRequest
from moevolve.search.interface.checkpoints.profile import ProfileRequest
from moevolve.search.interface.checkpoints.recipe import ApplyRequest, RecipeRequest
from moevolve.search.interface.control import CancelRequest, PauseRequest, ScaleRequest, StopRequest, WatchRequest
from moevolve.search.interface.evaluate import EvaluateRequest
from moevolve.search.interface.individuals import AnalyseRequest, GenomeRequest, LineageRequest, ShowRequest
from moevolve.search.interface.plan import EstimateRequest
from moevolve.search.interface.rankings import BestRequest, ParetoRequest
from moevolve.search.interface.report import PlotRequest, ReportRequest
from moevolve.search.interface.running import LaunchRequest, ResumeRequest, RetryRequest, StudyRequest
from moevolve.search.interface.searches import (
    CompareRequest,
    EffectsRequest,
    FinalTableRequest,
    OverviewRequest,
    SearchesRequest,
)
from moevolve.search.server.serve import ServeRequest
from moevolve.search.shrink.request import ShrinkRequest

shrink = watched(function_of(ShrinkRequest))
launch = watched(function_of(LaunchRequest))
resume = watched(function_of(ResumeRequest))
retry = watched(function_of(RetryRequest))
watch = function_of(WatchRequest)
pause = function_of(PauseRequest)
stop = function_of(StopRequest)
cancel = function_of(CancelRequest)
scale = function_of(ScaleRequest)
estimate = watched(function_of(EstimateRequest))
study = watched(function_of(StudyRequest))

searches = function_of(SearchesRequest)
final_table = function_of(FinalTableRequest)
compare = function_of(CompareRequest)
effects = function_of(EffectsRequest)
best = function_of(BestRequest)
pareto = function_of(ParetoRequest)
show = function_of(ShowRequest)
overview = function_of(OverviewRequest)
genome = function_of(GenomeRequest)
lineage = function_of(LineageRequest)

evaluate = watched(function_of(EvaluateRequest))
answers = watched(function_of(AnswersRequest))
prompts = function_of(PromptsRequest)
analyse = function_of(AnalyseRequest)
export = watched(function_of(ExportRequest))
recipe = function_of(RecipeRequest)
apply = function_of(ApplyRequest)
import_eep = function_of(ImportEepRequest)
profile = watched(function_of(ProfileRequest))
plot = function_of(PlotRequest)
report = function_of(ReportRequest)
serve = watched(function_of(ServeRequest))
