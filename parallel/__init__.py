"""Process layout: topology, groups, parameter specs and parallel layers."""

from .registry import ProcessGroupRegistry as ProcessGroupRegistry
from .spec import P as P
from .spec import annotate as annotate
from .spec import declare as declare
from .spec import spec_of as spec_of
from .topology import Topology as Topology
