# bash completion of distrain, written by `distrain completion bash`
_distrain() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} options=
  local command=
  COMPREPLY=()
  # `--option=value` comes as three words.
  if [[ $cur == '=' ]]; then
    cur=
  elif [[ $prev == '=' ]]; then
    prev=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  prev=${prev//_/-}
  ((COMP_CWORD > 1)) && command=${COMP_WORDS[1]}
  case $command in
    hybrid) options='--num-embeddings --embedding-dim --classes --task --dense --table --servers --hash-bits --max-rows --prefetch --wire-dtype --data --valid-data --test-data --in-memory --data-from --data-format --labels --shuffle-buffer --bad-rows --trainers --epochs --steps --batch-size --mode --optimizer --lr --momentum --weight-decay --lr-schedule --clip --seed --log-interval --batches-per-epoch --steps-per-epoch --average-over --accumulate --gradient-dtype --checkpoint --checkpoint-every --on-save-error --resume --keep --eval-only --max-restarts --save-timeout --local --rank --ranks --spawn --world-size --master-addr --master-port --listen --port-range --token-file --insecure --job-id --transport --rpc-timeout --collective-timeout --join-timeout --peer-timeout --device --trace --threads --inject --pretty --progress --log --quiet --config --print-config --dry-run --help --version' ;;
    ps) options='--limit --dropout --num-gpus --mean --std --data --valid-data --test-data --trainers --epochs --steps --batch-size --mode --min-trainers --optimizer --lr --momentum --weight-decay --lr-schedule --clip --seed --log-interval --accumulate --servers --staleness --verify-grads --checkpoint --checkpoint-every --on-save-error --resume --keep --eval-only --max-restarts --save-timeout --local --rank --ranks --spawn --world-size --master-addr --master-port --listen --port-range --token-file --insecure --job-id --transport --rpc-timeout --collective-timeout --join-timeout --peer-timeout --device --trace --threads --inject --pretty --progress --log --quiet --config --print-config --dry-run --help --version' ;;
    rnn) options='--gradient-dtype --vocab-size --embedding-dim --nhid --nlayers --dropout --data --valid-data --test-data --token-type --in-memory --generate --prompt --trainers --epochs --steps --batch-size --mode --optimizer --lr --momentum --weight-decay --lr-schedule --clip --seed --log-interval --batches-per-epoch --accumulate --bptt --checkpoint --checkpoint-every --on-save-error --resume --keep --eval-only --max-restarts --save-timeout --local --rank --ranks --spawn --world-size --master-addr --master-port --listen --port-range --token-file --insecure --job-id --transport --rpc-timeout --collective-timeout --join-timeout --peer-timeout --device --trace --threads --inject --pretty --progress --log --quiet --config --print-config --dry-run --help --version' ;;
    rl) options='--observers --envs-per-observer --max-steps --optimizer --lr --momentum --weight-decay --lr-schedule --clip --seed --log-interval --gamma --threshold --max-episodes --checkpoint --checkpoint-every --on-save-error --resume --keep --max-restarts --save-timeout --local --rank --ranks --spawn --world-size --master-addr --master-port --listen --port-range --token-file --insecure --job-id --transport --rpc-timeout --collective-timeout --join-timeout --peer-timeout --device --trace --threads --inject --pretty --progress --log --quiet --config --print-config --dry-run --help --version' ;;
    pipeline) options='--model --stages --split --image-size --classes --data --valid-data --test-data --weights --optimizer --lr --momentum --weight-decay --lr-schedule --clip --seed --log-interval --micro-batches --schedule --batches --epochs --batch-size --loss --checkpoint --checkpoint-every --on-save-error --resume --keep --max-restarts --save-timeout --local --rank --ranks --spawn --world-size --master-addr --master-port --listen --port-range --token-file --insecure --job-id --transport --rpc-timeout --collective-timeout --join-timeout --peer-timeout --explain --device --trace --threads --inject --pretty --progress --log --quiet --config --print-config --dry-run --help --version' ;;
    predict) options='--num-gpus --in-memory --generate --max-episodes --device --trace --threads --pretty --progress --log --quiet --help' ;;
    report) options='--output --trace' ;;
    help) ((COMP_CWORD == 2)) && options='hybrid ps rnn rl pipeline predict report help man completion schema' ;;
    man) ((COMP_CWORD == 2)) && options='hybrid ps rnn rl pipeline predict report help man completion schema' ;;
    completion) ((COMP_CWORD == 2)) && options='bash zsh fish' ;;
    schema) ((COMP_CWORD == 2)) && options='start waiting ready ddp checkpoint restart config plan warn error rank_end end step epoch eval prediction lost returned text episode split' ;;
    '') options='hybrid ps rnn rl pipeline predict report help man completion schema --help --version' ;;
  esac
  case $command/$prev in
    hybrid/--task)
      mapfile -t COMPREPLY < <(compgen -W 'classes binary' -- "$cur"); return
      ;;
    hybrid/--table)
      mapfile -t COMPREPLY < <(compgen -W 'module sharded' -- "$cur"); return
      ;;
    hybrid/--wire-dtype)
      mapfile -t COMPREPLY < <(compgen -W 'fp32 bf16 fp16' -- "$cur"); return
      ;;
    hybrid/--data)
      compopt -o filenames; mapfile -t COMPREPLY < <(compgen -W 'teacher' -- "$cur"; compgen -f -- "$cur"); return
      ;;
    hybrid/--valid-data | hybrid/--test-data | hybrid/--token-file | hybrid/--trace | hybrid/--log | hybrid/--config | ps/--token-file | ps/--trace | ps/--log | ps/--config | rnn/--data | rnn/--valid-data | rnn/--test-data | rnn/--token-file | rnn/--trace | rnn/--log | rnn/--config | rl/--token-file | rl/--trace | rl/--log | rl/--config | pipeline/--weights | pipeline/--token-file | pipeline/--trace | pipeline/--log | pipeline/--config | predict/--trace | predict/--log | report/--output | report/--trace)
      compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$cur"); return
      ;;
    hybrid/--data-from)
      mapfile -t COMPREPLY < <(compgen -W 'auto each rank0' -- "$cur"); return
      ;;
    hybrid/--data-format)
      mapfile -t COMPREPLY < <(compgen -W 'auto fasttext criteo' -- "$cur"); return
      ;;
    hybrid/--bad-rows)
      mapfile -t COMPREPLY < <(compgen -W 'stop skip' -- "$cur"); return
      ;;
    hybrid/--mode | rnn/--mode)
      mapfile -t COMPREPLY < <(compgen -W 'async sync' -- "$cur"); return
      ;;
    hybrid/--optimizer)
      mapfile -t COMPREPLY < <(compgen -W 'sgd adagrad rowwise-adagrad adam adamw rmsprop' -- "$cur"); return
      ;;
    hybrid/--log-interval | hybrid/--rank | ps/--log-interval | ps/--rank | rnn/--log-interval | rnn/--rank | rl/--log-interval | rl/--rank | pipeline/--log-interval | pipeline/--rank)
      mapfile -t COMPREPLY < <(compgen -W 'auto' -- "$cur"); return
      ;;
    hybrid/--average-over)
      mapfile -t COMPREPLY < <(compgen -W 'data trainers' -- "$cur"); return
      ;;
    hybrid/--gradient-dtype | rnn/--gradient-dtype)
      mapfile -t COMPREPLY < <(compgen -W 'float32 float16 bfloat16' -- "$cur"); return
      ;;
    hybrid/--checkpoint | ps/--data | ps/--valid-data | ps/--test-data | ps/--checkpoint | rnn/--checkpoint | rl/--checkpoint | pipeline/--data | pipeline/--valid-data | pipeline/--test-data | pipeline/--checkpoint)
      compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$cur"); return
      ;;
    hybrid/--on-save-error | ps/--on-save-error | rnn/--on-save-error | rl/--on-save-error | pipeline/--on-save-error)
      mapfile -t COMPREPLY < <(compgen -W 'continue stop' -- "$cur"); return
      ;;
    hybrid/--resume | ps/--resume | rnn/--resume | rl/--resume | pipeline/--resume)
      compopt -o filenames; mapfile -t COMPREPLY < <(compgen -W 'auto' -- "$cur"; compgen -d -- "$cur"); return
      ;;
    hybrid/--eval-only | hybrid/--local | hybrid/--spawn | hybrid/--insecure | hybrid/--pretty | hybrid/--quiet | hybrid/--print-config | hybrid/--dry-run | hybrid/--help | hybrid/--version | ps/--verify-grads | ps/--eval-only | ps/--local | ps/--spawn | ps/--insecure | ps/--pretty | ps/--quiet | ps/--print-config | ps/--dry-run | ps/--help | ps/--version | rnn/--eval-only | rnn/--local | rnn/--spawn | rnn/--insecure | rnn/--pretty | rnn/--quiet | rnn/--print-config | rnn/--dry-run | rnn/--help | rnn/--version | rl/--local | rl/--spawn | rl/--insecure | rl/--pretty | rl/--quiet | rl/--print-config | rl/--dry-run | rl/--help | rl/--version | pipeline/--local | pipeline/--spawn | pipeline/--insecure | pipeline/--explain | pipeline/--pretty | pipeline/--quiet | pipeline/--print-config | pipeline/--dry-run | pipeline/--help | pipeline/--version | predict/--pretty | predict/--quiet | predict/--help)
      :
      ;;
    hybrid/--master-addr | ps/--master-addr | rnn/--master-addr | rl/--master-addr | pipeline/--master-addr)
      mapfile -t COMPREPLY < <(compgen -A hostname -- "$cur"); return
      ;;
    hybrid/--transport | ps/--transport | rnn/--transport | rl/--transport | pipeline/--transport)
      mapfile -t COMPREPLY < <(compgen -W 'auto tcp unix' -- "$cur"); return
      ;;
    hybrid/--device | ps/--device | rnn/--device | rl/--device | pipeline/--device | predict/--device)
      mapfile -t COMPREPLY < <(compgen -W 'cpu cuda' -- "$cur"); return
      ;;
    hybrid/--progress | ps/--progress | rnn/--progress | rl/--progress | pipeline/--progress | predict/--progress)
      mapfile -t COMPREPLY < <(compgen -W 'auto plain none' -- "$cur"); return
      ;;
    ps/--dropout)
      mapfile -t COMPREPLY < <(compgen -W 'on off' -- "$cur"); return
      ;;
    ps/--mode)
      mapfile -t COMPREPLY < <(compgen -W 'async sync ssp' -- "$cur"); return
      ;;
    ps/--optimizer | rnn/--optimizer | rl/--optimizer | pipeline/--optimizer)
      mapfile -t COMPREPLY < <(compgen -W 'sgd adagrad adam adamw rmsprop' -- "$cur"); return
      ;;
    rnn/--token-type)
      mapfile -t COMPREPLY < <(compgen -W 'uint16 uint32' -- "$cur"); return
      ;;
    pipeline/--model)
      mapfile -t COMPREPLY < <(compgen -W 'resnet50 resnet18' -- "$cur"); return
      ;;
    pipeline/--schedule)
      mapfile -t COMPREPLY < <(compgen -W 'gpipe 1f1b naive' -- "$cur"); return
      ;;
    pipeline/--loss)
      mapfile -t COMPREPLY < <(compgen -W 'mse ce' -- "$cur"); return
      ;;
    */--*) return ;; # text and numbers
    predict/* | report/*)
      if [[ $cur != -* ]]; then
        local kind=-f
        [[ $command == predict ]] && ((COMP_CWORD == 2)) && kind=-d # the checkpoint
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen $kind -- "$cur")
        return
      fi
      ;;
  esac
  mapfile -t COMPREPLY < <(compgen -W "$options" -- "$cur")
}
complete -F _distrain distrain
