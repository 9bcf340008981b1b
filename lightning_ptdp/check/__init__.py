"""Finds out, in one process, whether a layout computes what one process computes."""

from lightning_ptdp.check.checking import check
from lightning_ptdp.check.report import ParameterReport, Report

__all__ = ["check", "ParameterReport", "Report"]
