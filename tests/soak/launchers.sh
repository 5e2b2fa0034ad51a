#!/bin/bash
# ctest: labels=noasan timeout=300 serial
# Two concurrent jobs by each installed launcher (Hydra, Open MPI, Slurm as root): the jobs neither mix nor wait for
# each other, and ranks know how many ranks share the CPUs.
# shellcheck source-path=SCRIPTDIR source=../cli/lib.bash
# shellcheck disable=SC2317  # functions that are called through others
source "$(dirname "$0")/../cli/lib.bash"
tested=

# The command of each rank of job $1. It writes its lines to its own file, because launchers may mix lines of ranks.
cat >"$tmp/rank" <<END
#!/bin/bash
job=\$1; shift
exec $distrain hybrid --epochs 3 "\$@" >"$tmp/\$job.\$\$"
END
chmod +x "$tmp/rank"

# check_job <job> <exit code>: checks that four ranks of one run have succeeded.
check_job() {
  code=$2
  expect 0 "$1"
  cat "$tmp/$1".* >"$tmp/$1" 2>/dev/null
  expect_jq '[.[] | select(.event == "end")] | length == 4 and all(.[]; .status == "ok")
    and (map(.run) | unique | length == 1)' "$1" "$tmp/$1"
  expect_jq "[.[] | select(.event == \"ready\").threads] | unique == [$threads]" "$1: threads" "$tmp/$1"
}
cores=$(nproc)
threads=$((cores > 4 ? cores / 4 : 1))

# two_jobs <name> <launcher>...: runs and checks two concurrent jobs.
two_jobs() {
  local name=$1 job pids=() codes=()
  shift
  for job in a b; do
    timeout -k 2 "$limit" "$@" "$tmp/rank" "$name-$job" >"$tmp/out.$name-$job" 2>&1 &
    pids+=($!)
  done
  for job in 0 1; do
    wait "${pids[job]}"
    codes[job]=$?
  done
  check_job "$name-a" "${codes[0]}"
  check_job "$name-b" "${codes[1]}"
  [[ $(tail -qn 1 "$tmp/$name"-[ab] | jq -r .run | sort -u | wc -l) == 2 ]] || fail "$name: two jobs are one run"
  tested+=" $name"
}

if command -v mpiexec.hydra >/dev/null; then
  two_jobs hydra mpiexec.hydra -n 4
fi
if command -v mpirun.openmpi >/dev/null; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  two_jobs openmpi mpirun.openmpi -n 4 --oversubscribe
fi

# ---- Slurm: two nodes, both this machine ----

slurm_down() {
  local pids
  mapfile -t pids < <(cat "$tmp"/slurm/slurm*.pid 2>/dev/null)
  ((${#pids[@]})) && kill "${pids[@]}" 2>/dev/null
  none_of_them() { ! kill -0 "${pids[@]}" 2>/dev/null; }
  wait_for 10 none_of_them
  munged --stop --socket="$tmp/slurm/munge.sock" >/dev/null 2>&1
  cleanup
}
slurm_up() {
  local d=$tmp/slurm port node
  mkdir -p "$d/state"
  chmod 755 "$tmp" "$d" "$d/state"
  (umask 077 && dd if=/dev/urandom of="$d/munge.key" bs=128 count=1 status=none)
  port=$(free_port)
  cat >"$d/slurm.conf" <<END
ClusterName=test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$d/munge.sock
SlurmctldPort=$port
StateSaveLocation=$d/state
SlurmctldPidFile=$d/slurmctld.pid
SlurmctldLogFile=$d/slurmctld.log
SlurmdSpoolDir=$d/spool.%n
SlurmdPidFile=$d/slurmd.%n.pid
SlurmdLogFile=$d/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=2
NodeName=n1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=$(free_port) CPUs=8
NodeName=n2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=$(free_port) CPUs=8
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
END
  export SLURM_CONF=$d/slurm.conf
  trap slurm_down EXIT
  munged --force --key-file="$d/munge.key" --socket="$d/munge.sock" --pid-file="$d/munged.pid" \
    --log-file="$d/munged.log" --seed-file="$d/munged.seed" || return
  slurmctld -f "$SLURM_CONF" -c && for node in n1 n2; do slurmd -f "$SLURM_CONF" -N $node || return; done
  both_idle() { [[ $(sinfo -h -t idle -o %D 2>/dev/null) == 2 ]]; }
  wait_for 30 both_idle
}

if command -v srun >/dev/null && command -v slurmctld >/dev/null && ((EUID == 0)); then
  if ! slurm_up >"$tmp/log" 2>&1; then
    fail "Slurm does not start: $(tail -n 3 "$tmp/log" "$tmp"/slurm/*.log)"
    finish
  fi
  # Two steps of one allocation, each on one node.
  cat >"$tmp/steps" <<END
#!/bin/bash
for job in a b; do
  (timeout -k 2 $limit srun -N1 -n4 --exact "$tmp/rank" slurm-\$job; echo \$? >"$tmp/code-\$job") &
done
wait
END
  chmod +x "$tmp/steps"
  timeout -k 2 "$limit" salloc -N1 -n8 "$tmp/steps" >"$tmp/out" 2>&1
  check_job slurm-a "$(cat "$tmp/code-a")"
  check_job slurm-b "$(cat "$tmp/code-b")"
  [[ $(tail -qn 1 "$tmp"/slurm-[ab] | jq -r .run | sort -u | wc -l) == 2 ]] || fail "slurm: two steps are one run"
  # Two nodes; Slurm does not tell that both are the same machine.
  timeout -k 2 "$limit" srun -N2 -n4 --ntasks-per-node=2 "$tmp/rank" nodes --master-addr 127.0.0.1
  check_job nodes $?
  timeout -k 2 20 srun -N2 -n4 --ntasks-per-node=2 "$tmp/rank" astray 2>"$tmp/err"
  code=$?
  expect 2 "no --master-addr on two nodes"
  grep -q "need --master-addr HOST" "$tmp/err" || fail "no --master-addr on two nodes: $(head -n 3 "$tmp/err")"
  tested+=" slurm"
fi
[[ $tested ]] || {
  echo "skipped: no launcher is installed"
  exit 77 # CTest reports the test as skipped
}
echo "tested:$tested"
expect_no_process "at the end"
finish
