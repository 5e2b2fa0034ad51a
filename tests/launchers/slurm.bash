# A Slurm cluster of two nodes, n1 and n2, whose daemons all run on this machine as root. Source this file after
# lib.bash.
need slurmctld slurmd srun sbatch munged
((EUID == 0)) || skip "Slurm's daemons need root"

own_hosts "127.0.0.2 n1" "127.0.0.3 n2"

# Prints the pids of the cluster's processes that are still there: daemons, and steps with their tasks.
cluster_processes() {
  local dir
  for dir in /proc/[0-9]*; do
    grep -qzxsF "SLURM_CONF=$tmp/slurm/slurm.conf" "$dir/environ" || continue
    case $(cat "$dir/comm" 2>/dev/null) in
      slurmctld | slurmd | slurmstepd | munged) echo "${dir#/proc/}" ;;
      *) grep -qzsE '^SLURMD_NODENAME=' "$dir/environ" && echo "${dir#/proc/}" ;;
    esac
  done
}

# shellcheck disable=SC2317  # called by trap
slurm_down() {
  local pid
  scancel --quiet --user=root 2>/dev/null
  wait_for 10 no_jobs
  for pid in $(cluster_processes); do kill -9 "$pid" 2>/dev/null; done
  cleanup
}
no_jobs() { [[ ! $(squeue -h 2>/dev/null) ]]; }

slurm_up() {
  local d=$tmp/slurm node
  mkdir -p "$d/state"
  chmod 755 "$tmp" "$d" "$d/state"
  (umask 077 && head -c 128 /dev/urandom >"$d/munge.key")
  # With cred_expire, a job that is requeued waits for 10 s, not for 120 s. FirstJobId keeps the jobs of clusters on one
  # machine apart.
  cat >"$d/slurm.conf" <<END
ClusterName=test
FirstJobId=$((RANDOM + 1000))
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$d/munge.sock,cred_expire=10
SlurmctldPort=$(free_port)
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
KillWait=30
NodeName=n1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.2 Port=$(free_port) CPUs=8 RealMemory=64000
NodeName=n2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.3 Port=$(free_port) CPUs=8 RealMemory=64000
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
END
  export SLURM_CONF=$d/slurm.conf
  trap slurm_down EXIT
  munged --force --key-file="$d/munge.key" --socket="$d/munge.sock" --pid-file="$d/munged.pid" \
    --log-file="$d/munged.log" --seed-file="$d/munged.seed" || return
  slurmctld -f "$SLURM_CONF" -c && for node in n1 n2; do slurmd -f "$SLURM_CONF" -N $node || return; done
  both_idle() { [[ $(sinfo -h -t idle -o %D 2>/dev/null) == 2 ]]; }
  wait_for "$limit" both_idle
}

if ! slurm_up >"$tmp/log" 2>&1; then
  fail "Slurm does not start: $(tail -n 3 "$tmp/log" "$tmp"/slurm/*.log)"
  finish
fi
