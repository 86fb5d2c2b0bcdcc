"""The table of operators: each path of each public function of fedkernels, once.

A path is a call of a public function that runs code of its own: another option, another number of rows, another input that
needs a gradient. A new operator or option is one more entry here, and all that follows is tested of it. Tests of one
operator, test_NAME.py, hold what this table cannot know: values against an independent formula, and numerical edges.

What runs over the table (all of it on a GPU too, where there is one):

test_properties.py: values and gradients of every path against its reference in float64, at sizes beside the kernels' tiles,
    in all dtypes and mixtures of them, all layouts (transposed, in steps, shifted, expanded) and all choices of inputs that
    need a gradient; every reduction; dtypes of values and gradients. gradcheck in float64 of every differentiable path, of
    all its inputs and of each alone, compiled and by reference; gradgradcheck of the references.
test_contexts.py: of every path torch.compile(fullgraph=True) with values and gradients, compiled and by reference, with
    dynamic sizes and without; torch.export for batches of any size, compiled and by reference, modules of fedkernels.nn too;
    autocast; narrow inputs summed wide; torch.func's grad, vmap and jvp; forward mode; several gradients at once; 1, 2 and 4
    threads; forked workers; meta and fake tensors. Of two_views and view_parameters too; only the reference of two_views
    under torch.compile is left to test_two_views.py.
test_compiled_operators.py: opcheck of every registered operator and of each of its options and gradients; threads to the
    last bit.
test_refusals.py: of every argument of every function here what it refuses, with the message: other types, dtypes, layouts,
    devices, dimensions, empty ones, other numbers (True, strings, NaN, infinite, out of range), other options; shapes that
    do not fit together (MISFITS). Not: values within tensors, CKAAccumulator, MinibatchCKA, compare and ViewOptions.
test_adversarial.py: NaN, infinity, duplicates and huge or tiny entries in every input of every path, as by reference.
test_memory_and_autograd.py: overlapping inputs, outputs that share no memory, leaves used again, subclasses, inference mode,
    changes before the backward pass, second derivatives refused.
test_cuda.py: what only a GPU shows, on cases of its own sizes.
"""
