"""What `pdhandoff doctor` looks at: one module for each part of a machine, and what they find."""

from __future__ import annotations

from pdhandoff.cli.checks.finding import Check, Finding, Report, Status

__all__ = ["Check", "Finding", "Report", "Status"]
