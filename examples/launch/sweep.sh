#!/bin/bash
# Trains with several numbers of micro-batches, one after the other on this machine, and prints a table with the
# speed of each: `bash sweep.sh`. To sweep any other option, start one job for each value, as slurm-sweep.sbatch does.
values=1,2,4,8
job=(pipeline --model resnet18 --image-size 32 --classes 10 --batch-size 16)
log=sweep.jsonl

set -eu
distrain "${job[@]}" --num-split "$values" >"$log"
jq -r 'select(.event == "split") | [.num_split, .samples_per_s] | @tsv' "$log"
