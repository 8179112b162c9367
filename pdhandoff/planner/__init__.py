"""Token ranges, pages and shards in; copies and conversions out. Pure arithmetic: no memory is touched here."""

from pdhandoff.planner.conversions import COPY, Conversion, ConversionPart, derive_conversion
from pdhandoff.planner.copies import (
    CopyBlock,
    CopyPlan,
    Pair,
    WriteColumns,
    pair_components,
    plan_copies,
    plan_pair,
)
from pdhandoff.planner.heads import common_heads
from pdhandoff.planner.landing import (
    LandingPart,
    LandingRun,
    entry_component,
    landing_component,
    landing_entry,
    landing_parts,
    landing_runs,
    stepped_component,
)
from pdhandoff.planner.pages import PageTable, TokenRuns, admit_length, token_runs
from pdhandoff.planner.placement import Placement, layer_bases
from pdhandoff.planner.shards import Shard, check_cover, plan_shards, shard_manifest

__all__ = [
    "COPY",
    "Conversion",
    "ConversionPart",
    "CopyBlock",
    "CopyPlan",
    "LandingPart",
    "LandingRun",
    "PageTable",
    "Pair",
    "Placement",
    "Shard",
    "TokenRuns",
    "WriteColumns",
    "admit_length",
    "check_cover",
    "common_heads",
    "derive_conversion",
    "entry_component",
    "landing_component",
    "landing_entry",
    "landing_parts",
    "landing_runs",
    "layer_bases",
    "pair_components",
    "plan_copies",
    "plan_pair",
    "plan_shards",
    "shard_manifest",
    "stepped_component",
    "token_runs",
]
