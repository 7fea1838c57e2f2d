"""Decides which neurons live on the device: an integer program, solved once per model and machine.

The program is that of PowerInfer (Song et al., SOSP 2024, section 6.3, equations 1-8), in bytes and
for every layer: the device serves as much activation frequency as fits its budget, and a layer has
either no hot neuron or enough of them to pay for joining two partial sums. This package knows nothing
of devices, files or models that run: numbers in, masks out.
"""

from pjax.placement.explain import Explanation as Explanation
from pjax.placement.explain import explain_placement as explain_placement
from pjax.placement.place import solve_placement as solve_placement
from pjax.placement.place import step_seconds as step_seconds
from pjax.placement.problem import check_hardware as check_hardware
from pjax.placement.problem import layer_neuron_bytes as layer_neuron_bytes
from pjax.placement.problem import layer_times as layer_times
from pjax.placement.problem import min_hot_neurons as min_hot_neurons
from pjax.placement.problem import neuron_bytes as neuron_bytes
