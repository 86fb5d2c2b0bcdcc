#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one go and in under 9 minutes: build, self-test, tests, compute-sanitizer,
# benchmarks, and with what is left of the time two rows of FedU2's Table 1, which a later call continues.
#
#     benchmarks/on_gpu.sh
#
# It needs a torch with CUDA, an nvcc, a C++ compiler and ninja, and no network. In the environment:
#     PYTHON            the Python that has this torch (default: python3)
#     WHEELS            a folder of wheels of what this Python lacks; they are installed into a temporary folder
#     OUT               write below this folder (default: benchmarks/results/gpu)
#     CIFAR10           the folder with CIFAR-10 as torchvision has it, for the rows of Table 1
#     STAGES            names of the stages to run, as in "wheels build table1" where a card is lent several times
#                       (default: all)
#
# It writes CARD/on_gpu.json (each stage's outcome), CARD/results.json and results.md (the operators), CARD/simulation.json
# and simulation.md (whole runs), table1/ (the rows of Table 1) and CARD/log.txt.
# Each stage has a time limit, and the others run where one fails. Exit code: 0 where no stage failed, 1 where one did, 2
# where there is no GPU. The module is compiled in place, for this card alone.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
ALL=530 # seconds
SIMULATION=120 # of them for whole runs, at the end
python=${PYTHON:-python3}

ask() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }
card=$(ask name)
capability=$(ask compute_cap)
if [[ ! $capability =~ ^[0-9]+\.[0-9]+$ ]]; then
  echo "on_gpu.sh: no NVIDIA GPU was found by nvidia-smi" >&2
  exit 2
fi
slug=$(tr '[:upper:]' '[:lower:]' <<<"$card" | sed -E 's/[^a-z0-9]+/-/g; s/^-|-$//g')
folder=${OUT:-benchmarks/results/gpu}/$slug
mkdir -p "$folder" || exit 2
log=$folder/log.txt
: >"$log"
export PATH=$PATH:/usr/local/cuda/bin PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=2 FEDKERNELS_GPU=1 # a test that finds no GPU fails and is not skipped
export FEDKERNELS_CUDA_ARCHITECTURES=$capability
echo "$card, compute capability $capability -> $folder"

stages=() failed=0
record() { # stage, outcome, exit code, seconds
  stages+=("{\"stage\": \"$1\", \"outcome\": \"$2\", \"exit_code\": $3, \"seconds\": $4}")
  echo "$1: $2, $4 s"
}
wanted() { [[ -z ${STAGES:-} || " $STAGES " == *" $1 "* ]]; }
stage() { # name, limit in seconds, command
  local name=$1 limit=$2 start=$SECONDS code outcome=passed
  shift 2
  wanted "$name" || return
  ((limit > ALL - SECONDS)) && limit=$((ALL - SECONDS))
  if ((limit < 5)); then
    record "$name" "failed: no time was left" 124 0
    failed=1
    return
  fi
  printf '\n==== %s\n' "$name: $*" >>"$log"
  timeout -k 5 "$limit" "$@" >>"$log" 2>&1
  code=$?
  if ((code == 124 || code == 137)); then
    outcome="failed: not ready after $limit s"
  elif ((code)); then
    outcome=failed
  fi
  record "$name" "$outcome" "$code" $((SECONDS - start))
  if ((code)); then
    failed=1
    tail -n 15 "$log" | sed 's/^/    /'
  fi
}

if [[ -n ${WHEELS:-} ]]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  stage wheels 60 "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
  export PYTHONPATH=$PYTHONPATH:$site # last, so that nothing takes the place of what is there
fi
# Named, so that whoever reads of a failed test module knows why.
stage packages 30 "$python" -c '
import importlib.util, shutil, sys
wanted = {"torch": "torch", "pytest": "pytest", "hypothesis": "hypothesis", "ot": "POT", "quadprog": "quadprog", "scipy": "scipy"}
missing = [name for module, name in wanted.items() if importlib.util.find_spec(module) is None]
if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
    missing.append("ninja")
sys.exit("missing: " + ", ".join(missing) + "; put their wheels into a folder and name it in WHEELS" if missing else 0)'

stage build 150 bash -c '"$0" setup.py build_ext --inplace && "$0" -c "
import fedkernels.internal.native as native, sys
print(native.build_info())
sys.exit(0 if native.CUDA else \"the module holds no CUDA kernels\")"' "$python"
stage self-test 60 "$python" -m fedkernels.self_test
export FEDKERNELS_SELF_TEST=0 # what follows tests and measures the kernels, whatever became of that, and no reference
workers=()
"$python" -c 'import xdist' 2>/dev/null && workers=(-n 6)
"$python" -c 'import pytest_timeout' 2>/dev/null && workers+=(--timeout 60)
stage tests 150 "$python" -m pytest -q -p no:cacheprovider -m gpu --continue-on-collection-errors "${workers[@]}" \
  tests/fedkernels tests/fedssl/data/test_device_batches.py
for tool in memcheck racecheck synccheck; do
  if command -v compute-sanitizer >/dev/null; then
    # Without torch's cache each tensor is an allocation of its own, and what lies beyond it is out of bounds.
    stage $tool 60 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool \
      --kernel-name kernel_substring=fedkernels --report-api-errors no --error-exitcode 9 \
      "$python" -m pytest -q -p no:cacheprovider tests/fedkernels/test_cuda.py -k small_case
  elif wanted $tool; then
    record $tool "skipped: no compute-sanitizer" 0 0
  fi
done
stage benchmarks $((ALL - SECONDS - SIMULATION)) "$python" -m benchmarks --device cuda --output "$folder" \
  --seconds $((ALL - SECONDS - SIMULATION - 15))
stage simulation $ALL "$python" -m benchmarks.simulation --device cuda --output "$folder" \
  --seconds $((ALL - SECONDS - 25))
# The same command goes on where it was stopped, and the time is expected to end first.
if wanted table1; then
  if [[ -z ${CIFAR10:-} ]]; then
    record table1 "skipped: CIFAR10 names no folder" 0 0
  elif ((ALL - SECONDS < 30)); then
    record table1 "skipped: no time was left" 0 0
  else
    start=$SECONDS
    printf '\n==== table1\n' >>"$log"
    timeout -k 5 $((ALL - SECONDS)) "$python" -m fedssl run-table benchmarks/fedu2_table1_cell.yaml \
      --output "$folder/table1" data.path="$CIFAR10" device=cuda >>"$log" 2>&1
    code=$?
    outcome=passed
    if ((code == 124 || code == 137)); then
      outcome="to be continued"
    elif ((code)); then
      outcome=failed failed=1
      tail -n 15 "$log" | sed 's/^/    /'
    fi
    record table1 "$outcome" "$code" $((SECONDS - start))
  fi
fi

driver=$(ask driver_version)
toolkit=$(nvcc --version 2>/dev/null | sed -nE 's/.*release ([0-9.]+).*/\1/p')
versions=$("$python" -c 'import platform, torch; print(torch.__version__, torch.version.cuda, platform.python_version())')
read -r torch cuda python_version <<<"$versions"
{
  printf '{"card": "%s", "compute_capability": "%s", "driver": "%s", "nvcc": "%s", ' \
    "$card" "$capability" "$driver" "$toolkit"
  printf '"torch": "%s", "torch_cuda": "%s", "python": "%s", ' "${torch:-}" "${cuda:-}" "${python_version:-}"
  printf '"commit": "%s", "date": "%s", "seconds": %d, "stages": [\n' \
    "$(git rev-parse --short HEAD 2>/dev/null)" "$(date -u '+%Y-%m-%d %H:%M UTC')" "$SECONDS"
  printf '  %s' "${stages[0]:-}"
  ((${#stages[@]} > 1)) && printf ',\n  %s' "${stages[@]:1}"
  printf '\n]}\n'
} >"$folder/on_gpu.json"
echo "written to $folder in $SECONDS s"
exit $failed
