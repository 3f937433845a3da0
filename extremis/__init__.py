"""The Python API and the command line of Extremis."""

from extremis.installation import require_ours

require_ours()
