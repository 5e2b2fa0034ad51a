#!/bin/bash
# The commands of docs/write-a-job.md, in its order. Needs the programs of this folder on PATH.
# shellcheck disable=SC1090
set -eo pipefail

python3 examples/make_data.py

matrix_factorization --data ratings.txt |
  jq -c 'select(.event == "eval") | {epoch, loss, abs_error}'

for rank in 0 1 2 3; do
  matrix_factorization --data ratings.txt --epochs 2 --rank $rank >rank$rank.jsonl &
done
wait

matrix_factorization --data ratings.txt --epochs 5 --checkpoint run1 >first.jsonl
matrix_factorization --checkpoint run1 --resume auto --epochs 10 |
  jq -c 'select(.event == "checkpoint") | {action, step}'

matrix_factorization --help | grep -A 3 '^Model'
source <(matrix_factorization completion bash)

matrix_factorization --data ratings.txt --epochs 2 --trainers 4 --min-trainers 2 \
  --checkpoint run2 --max-restarts 10 >restarts.jsonl

mlp --data digits --checkpoint run3 |
  jq -c 'select(.event == "end" and .scope == "job") | {steps, loss, accuracy}'
mlp --data digits --local --threads 1 |
  jq -c 'select(.event == "end") | {steps, loss, accuracy}'

mlp predict run3 digits |
  jq -c 'select(.event == "prediction" and .index < 3) | [.index, .label, .expected]'
