#!/usr/bin/env bash
# What needs an NVIDIA GPU, in two calls on a machine that has torch with CUDA, Python 3.12 and no network.
#
#   benchmarks/on_gpu.sh pack [CIFAR10.npz]   here: what that machine lacks, into build/gpu (sm_90); tells its size
#   benchmarks/on_gpu.sh correctness          there: the self-test, the tests, memcheck and racecheck, in 300 s
#   benchmarks/on_gpu.sh speed                there: a training in two precisions, then the operators, in 360 s
#
# A call writes at most 8 files into OUT (default: benchmarks/results/gpu), and says what ended with which exit code. A
# step that fails, or is not ready in its time, does not end the others. PYTHON names the Python that has torch.
# REHEARSE=1 runs a call on the CPU, with tiny sizes.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python=${PYTHON:-python3} out=${OUT:-benchmarks/results/gpu} work=$(mktemp -d) device=cuda failed=0
trap 'rm -rf "$work"' EXIT
[ "${REHEARSE:-}" = 1 ] && device=cpu

step() { # NAME SECONDS COMMAND...: what it prints goes to OUT/NAME.txt
  local name=$1 limit=$2 code
  shift 2
  timeout -k 5 "$limit" "$@" >"$out/$name.txt" 2>&1
  code=$?
  [ $code = 0 ] || failed=1
  echo "[$SECONDS s] $name: exit code $code$([ $code = 124 ] && echo ", not ready after $limit s")"
  tail -n 14 "$out/$name.txt"
  return $code
}

pack() {
  set -e
  local target="--only-binary=:all: --python-version=3.12 --implementation=cp -d build/gpu/wheels"
  for glibc in 28 27 17; do target+=" --platform=manylinux_2_${glibc}_x86_64"; done
  rm -rf build/gpu
  FEDKERNELS_CUDA=1 FEDKERNELS_CUDA_ARCHITECTURES=90 $python setup.py -q build_ext --build-lib build/gpu
  # What an image with torch, scipy, timm and pytest lacks, with what it requires; then what needs nothing more.
  $python -m pip download -q $target 'pydantic>=2.10' 'tensorboard>=2.18' 'rich>=13' 'typer>=0.15'
  $python -m pip download -q $target --no-deps POT==0.9.5 quadprog kornia kornia_rs open_clip_torch ftfy wcwidth \
    torch_cka pytorch-metric-learning liger-kernel inf-cl
  rm -f build/gpu/wheels/{numpy,pillow,setuptools}-*.whl # timm and torch have brought them
  local some='import sys, numpy; arrays = {name: array[:5000] for name, array in numpy.load(sys.argv[1]).items()}'
  [ -z "${1:-}" ] || $python -c "$some; numpy.savez_compressed('build/gpu/cifar10.npz', **arrays)" "$1"
  local bytes=$( (git ls-files -z && find build/gpu -type f -print0) | du -cb --files0-from=- | tail -n 1 | cut -f 1)
  echo "build/gpu and all tracked files: $((bytes >> 20)) of 64 MiB"
  [ "$bytes" -le $((64 << 20)) ]
}

prepare() {
  mkdir -p "$out"
  for wheel in build/gpu/wheels/*.whl; do $python -m zipfile -e "$wheel" "$work/site"; done
  cp build/gpu/fedkernels/_C* fedkernels/ || exit 2
  export PATH=$PATH:/usr/local/cuda/bin PYTHONPATH=$PWD:${PYTHONPATH:+$PYTHONPATH:}$work/site PYTHONUNBUFFERED=1
  export OMP_NUM_THREADS=2 TQDM_DISABLE=1
  # POT would import each of these, and JAX would take three quarters of the card's memory.
  export POT_BACKEND_DISABLE_JAX=1 POT_BACKEND_DISABLE_CUPY=1 POT_BACKEND_DISABLE_TENSORFLOW=1
  if [ $device = cuda ]; then
    export FEDKERNELS_GPU=1 # a test that finds no GPU fails and is not skipped
    nvidia-smi >"$out/card.txt" || exit 2
  fi
  echo "[$SECONDS s] unpacked"
}

sanitize() { # TOOL CASES: without torch's cache each tensor is an allocation, and what lies beyond it is out of bounds
  step "$1" 180 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --kernel-name kernel_substring=fedkernels \
    --report-api-errors no --print-limit 20 --error-exitcode 9 --tool "$1" \
    $python -m pytest -q -x -p no:cacheprovider tests/fedkernels/test_cuda.py -k "$2"
}

correctness() {
  step self_test 80 $python -m fedkernels.self_test
  export FEDKERNELS_SELF_TEST=0 # all else is of the kernels, not of references, and no tool watches that test
  local tests="tests/fedkernels -m gpu -n 10 --dist worksteal --timeout 60" tools=
  [ $device = cpu ] && tests=tests/fedkernels/test_cuda.py
  if [ $device = cuda ] && command -v compute-sanitizer >/dev/null; then
    (sanitize memcheck small_case) & tools+=" $!"
    (sanitize racecheck "small_case and not large") & # a large transport would take more than its time
    tools+=" $!"
  fi
  step tests 180 $python -m pytest -q -p no:cacheprovider $tests
  for tool in $tools; do wait "$tool" || failed=1; done
}

speed() {
  export FEDKERNELS_SELF_TEST=0
  local small= tiny= watch=
  if [ $device = cpu ]; then
    small=--rehearse
    tiny="training.local_epochs=1 training.batch_size=8 architectures=[small_convnet] data.train_limit=500"
    tiny+=" data.test_limit=100 partition.min_samples=8"
  else
    nvidia-smi --query-gpu=timestamp,utilization.gpu,memory.used,power.draw,clocks.sm --format=csv -lms 500 \
      >"$out/utilisation.csv" & watch=$!
  fi
  for precision in float32 bfloat16; do
    step train_$precision 60 $python -m fedssl run fedu2 preset=paper:fedu2 data.name=npz \
      data.path=build/gpu/cifar10.npz device=$device rounds=2 training.precision=$precision $tiny \
      --output "$work/$precision"
  done
  [ -z "$watch" ] || kill "$watch"
  export OMP_NUM_THREADS=16
  step operators 230 $python -m benchmarks ${OPERATORS:-unbalanced_ot client_weights two_views clip_loss sigmoid_loss \
    supervised_contrastive_loss nt_xent linear_cka info_nce} --device cuda $small --seconds 190 --output "$out"
}

case "${1:-} $#" in
"pack 1" | "pack 2") pack "${2:-}"; exit ;; # with && or || after it, its set -e would not hold
"correctness 1" | "speed 1") prepare && "$1" ;;
*) echo "on_gpu.sh: expected pack [CIFAR10.npz], correctness or speed, got: $*" >&2 && exit 2 ;;
esac
exit $failed
