#!/bin/bash
# ctest: labels=ci timeout=300
# Runs every fenced block of README.md and docs/*.md, or only those of the pages in further arguments: see
# docs_blocks.py.

# Use an own network namespace, if this user may create one, because other jobs may use the ports in the pages.
if [[ -z ${own_network:-} ]] && unshare -n ip link set lo up 2>/dev/null; then
  exec env own_network=1 unshare -n bash -c 'ip link set lo up && exec bash "$@"' bash "$0" "$@"
fi

# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

# Make small versions of the files that ./run demo, ./run demo ps and ./run demo rnn fetch.
scratch=$tmp/scratch
mkdir -p "$scratch/.deps/data" "$tmp/bin"
python3 - "$scratch/.deps/data" <<'PYTHON'
import random, sys
random.seed(1)
labels = ["earn", "acq", "crude", "trade", "money-fx", "interest", "ship", "grain"]
for name, count in (("r8.train", 800), ("r8.test", 200)):
    with open(f"{sys.argv[1]}/{name}", "w") as file:
        for _ in range(count):
            label = random.randrange(8)
            words = [f"w{random.randrange(20) * 8 + (label if random.random() < 0.7 else random.randrange(8))}"
                     for _ in range(20)]
            file.write(f"__label__{labels[label]} {' '.join(words)}\n")
PYTHON
make_text 300 >"$scratch/.deps/data/kjv.train"
make_text 30 >"$scratch/.deps/data/kjv.valid"
sed -i '1s/^/in the beginning god said , /' "$scratch/.deps/data/kjv.train"
make_images "$tmp/images" 640 100 28 bars
cp -r "$root/examples" "$scratch/examples"

# Make stand-ins for ssh and for launchers, which start all ranks here with the variables that the real launchers set.
cat >"$tmp/launch" <<'END'
#!/bin/bash
# Reads the options of torchrun, mpirun or srun up to the program, then starts its ranks.
nodes=1 each=0 count=0
while (($#)); do
  case $1 in
    --nnodes | -N) nodes=$2; shift ;;
    --nnodes=*) nodes=${1#*=} ;;
    --nproc-per-node | --ntasks-per-node) each=$2; shift ;;
    --nproc-per-node=* | --ntasks-per-node=*) each=${1#*=} ;;
    -n | -np | --ntasks) count=$2; shift ;;
    --ntasks=*) count=${1#*=} ;;
    -x | --rdzv-backend | --rdzv-endpoint | --rdzv-id | --node-rank | --host | -H | --max-restarts) shift ;;
    -*) ;;
    *) break ;;
  esac
  shift
done
((count)) || count=$((nodes * (each ? each : 1)))
job=$$
for ((r = 0; r < count; ++r)); do
  case ${0##*/} in
    torchrun) env RANK=$r LOCAL_RANK=$r WORLD_SIZE=$count LOCAL_WORLD_SIZE=$count MASTER_ADDR=localhost \
      MASTER_PORT="$port" TORCHELASTIC_RUN_ID=$job "$@" & ;;
    mpirun) env OMPI_COMM_WORLD_RANK=$r OMPI_COMM_WORLD_SIZE=$count OMPI_COMM_WORLD_LOCAL_RANK=$r \
      OMPI_COMM_WORLD_LOCAL_SIZE=$count PMIX_NAMESPACE=$job "$@" & ;;
    srun) env SLURM_PROCID=$r SLURM_NTASKS=$count SLURM_LOCALID=$r SLURM_JOB_ID=$job SLURM_STEP_ID=0 \
      SLURM_STEP_NUM_NODES="$nodes" "$@" & ;;
  esac
  pids[r]=$!
done
for pid in "${pids[@]}"; do wait "$pid" || exit; done
END
port=$(free_port)
sed -i "s/^job=/port=$port\njob=/" "$tmp/launch"
chmod +x "$tmp/launch"
for name in torchrun mpirun srun; do cp "$tmp/launch" "$tmp/bin/$name"; done
printf '#!/bin/sh\necho localhost\n' >"$tmp/bin/scontrol"
printf '#!/bin/sh\nshift\nexec "$@"\n' >"$tmp/bin/ssh"
chmod +x "$tmp/bin/scontrol" "$tmp/bin/ssh"
# Use small images instead of the images that ps finds without --data.
cat >"$tmp/bin/distrain" <<END
#!/bin/bash
[[ \$1 != ps || \$* == *--data* || \$* == *--resume* ]] || set -- "\$@" --data "$tmp/images"
exec -a "\$0" "$distrain" "\$@"
END
chmod +x "$tmp/bin/distrain"

PATH=$tmp/bin:$PATH NO_COLOR=1 python3 "$here/docs_blocks.py" "$root" "$scratch" "${@:2}" || failures=1
for file in "$root"/examples/launch/*; do
  grep -qF "<!-- file: examples/launch/${file##*/} -->" "$root"/docs/*.md || fail "no page quotes examples/launch/${file##*/}"
done
expect_no_process "after all blocks"
finish
