#!/bin/bash
# ctest: timeout=300
# Where rank, size and address come from: flags, torchrun's variables, Open MPI, PMI, Slurm in a step.
# shellcheck source-path=SCRIPTDIR source=lib.bash
source "$(dirname "$0")/lib.bash"

at() { # at <jq filter> [VAR=value]... [-- args...]
  local filter=$1 env=()
  shift
  while (($#)) && [[ $1 != -- ]]; do
    env+=("$1")
    shift
  done
  (($#)) && shift
  env "${env[@]}" timeout "$limit" "$distrain" hybrid --dump-placement "$@" >"$tmp/out" 2>"$tmp/err"
  code=$?
  expect 0 "${env[*]} -- $*"
  expect_jq ".[0] | $filter" "${env[*]} -- $*"
}
refused() { # refused <words> [VAR=value]... [-- args...]
  local words=$1 env=()
  shift
  while (($#)) && [[ $1 != -- ]]; do
    env+=("$1")
    shift
  done
  (($#)) && shift
  env "${env[@]}" timeout "$limit" "$distrain" hybrid --dump-placement "$@" >"$tmp/out" 2>"$tmp/err"
  code=$?
  expect_error 2 invalid "$words" "${env[*]} -- $*"
}

at '.mode == "spawn" and .ranks == [0,1,2,3] and .master_port == null'
at '.ranks | length == 7' -- --trainers 5
at '.trainers == 4' -- --world-size 6
at '.mode == "join" and .rank == 1 and .world_size == null and .master_port == 29500' -- --rank 1
at '.world_size == 4' -- --rank 0
at '.world_size == 5' -- --rank 1 --trainers 3

torchrun=(RANK=1 WORLD_SIZE=5 MASTER_ADDR=m MASTER_PORT=1234)
at '.rank == 1 and .world_size == 5 and .trainers == 3 and .master_addr == "m" and .master_port == 1234
    and .warning == ""' "${torchrun[@]}"
at '.master_port == 1235' "${torchrun[@]}" TORCHELASTIC_USE_AGENT_STORE=True
at '.master_port == 1234' "${torchrun[@]}" TORCHELASTIC_USE_AGENT_STORE=False
at '.master_port == 99' "${torchrun[@]}" TORCHELASTIC_USE_AGENT_STORE=True -- --master-port 99
at '.rank == 2 and .source == "--rank" and (.warning | test("RANK=1"))' "${torchrun[@]}" -- --rank 2
at '.master_addr == "n" and (.warning | test("MASTER_ADDR=m"))' "${torchrun[@]}" -- --master-addr n
at '.rank == 2 and (.warning | test("RANK=x"))' RANK=x -- --rank 2
at '.mode == "spawn" and .ranks == [0,1,2,3] and .master_port == null and .warning == ""' \
  "${torchrun[@]}" -- --spawn
at '.mode == "local" and .warning == ""' "${torchrun[@]}" -- --local

openmpi=(OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2)
slurm=(SLURM_PROCID=3 SLURM_NTASKS=6)
at '.rank == 2 and .world_size == 4 and .local_ranks == 2' "${openmpi[@]}"
at '.rank == 2' "${openmpi[@]}" PMI_RANK=1 PMI_SIZE=5 "${slurm[@]}" SLURM_STEP_ID=0
at '.rank == 1 and .world_size == 5' PMI_RANK=1 PMI_SIZE=5 "${slurm[@]}" SLURM_STEP_ID=0
at '.rank == 3 and .world_size == 6' "${slurm[@]}" SLURM_STEP_ID=0
at '.mode == "spawn"' "${slurm[@]}"
at '.rank == 1' "${openmpi[@]}" RANK=1 WORLD_SIZE=4

at '.mode == "spawn" and .ranks == [0,2,3] and .master_port == 29500' -- --ranks 0,2-3
at '.ranks == [2,3] and .world_size == null' -- --ranks 2-3
at '.ranks == [0,1,2,3] and .master_port == null' -- --ranks 0-3
at '.master_addr == "m" and .master_port == 1234 and .ranks == [2,3]' MASTER_ADDR=m MASTER_PORT=1234 \
  -- --ranks 2-3
at '.mode == "spawn" and (.warning | test("RANK=1"))' RANK=1 -- --ranks 0-1

# Which of the GPUs of its host a rank takes, in turn: by its launcher, else by its number among the
# ranks that want one.
at '.gpu_places == {"0":0,"1":1,"2":null,"3":2}' -- --device cuda
at '.gpu_places == {"0":null,"1":null,"2":null,"3":null}'
at '.gpu_places == {"2":null,"3":0}' -- --ranks 2-3 --device cuda
at '.gpu_places == {"0":0}' -- --local --device cuda
at '.gpu_places == {"3":2}' -- --rank 3 --device cuda
at '.gpu_places == {"3":2}' -- --rank 3 --device cuda --master-addr 10.0.0.1
at '.gpu_places == {"5":5}' -- --rank 5 --device cuda --trainers 8 --master-addr 10.0.0.1
at '.gpu_places == {"1":null}' -- --rank 1 --device cuda:1
at '.gpu_places == {"3":null}' -- --rank 3 --device trainer=cuda
at '.gpu_places == {"1":0}' "${torchrun[@]}" LOCAL_RANK=0 -- --device cuda
at '.gpu_places == {"3":1}' OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 -- --device cuda
at '.gpu_places == {"1":3}' PMI_RANK=1 PMI_SIZE=5 MPI_LOCALRANKID=3 -- --device cuda
at '.gpu_places == {"3":1}' "${slurm[@]}" SLURM_STEP_ID=0 SLURM_LOCALID=1 -- --device cuda
at '.gpu_places == {"3":3}' SLURM_LOCALID=1 -- --rank 3 --trainers 4 --device cuda # a batch script's
at '.gpu_places == {"0":0,"1":1,"2":null,"3":2}' LOCAL_RANK=3 -- --spawn --device cuda

refused "LOCAL_RANK must be" LOCAL_RANK=x -- --rank 1 --device cuda
refused "SLURM_LOCALID must be" SLURM_STEP_ID=0 SLURM_LOCALID=-1 -- --rank 1 --device cuda
refused "RANK must be" RANK=x
refused "RANK must be" RANK=
refused "RANK must be" RANK=-1
refused "WORLD_SIZE must be" RANK=0 WORLD_SIZE=four
refused "OMPI_COMM_WORLD_SIZE must be" OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=0
refused "MASTER_PORT must be" RANK=0 WORLD_SIZE=4 MASTER_PORT=70000
refused "MASTER_ADDR is empty" RANK=0 WORLD_SIZE=4 MASTER_ADDR=
refused "there is no rank 5" RANK=5 WORLD_SIZE=4
refused "WORLD_SIZE says 4" RANK=0 WORLD_SIZE=4 -- --trainers 3
refused "--spawn starts every rank here" PMI_RANK=0 PMI_SIZE=1
finish
