"""The torch side: process group, collectives, work handles. Importing this package imports no torch."""

from __future__ import annotations
