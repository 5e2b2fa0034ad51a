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
    hybrid) options='--trainers --num-embeddings --embedding-dim --classes --data --test-data --epochs --steps --batches --batch-size --lr --optimizer --mode --seed --log-interval --checkpoint --checkpoint-every --resume --local --rank --ranks --spawn --world-size --master-addr --master-port --listen --transport --rpc-timeout --join-timeout --peer-timeout --device --trace --threads --inject --quiet --help' ;;
    ps) options='--trainers --limit --dropout --num-gpus --mean --std --data --epochs --steps --batch-size --lr --mode --staleness --verify-grads --seed --log-interval --checkpoint --checkpoint-every --resume --local --rank --ranks --spawn --world-size --master-addr --master-port --listen --transport --rpc-timeout --join-timeout --peer-timeout --device --trace --threads --inject --quiet --help' ;;
    rnn) options='--trainers --vocab-size --emsize --nhid --nlayers --dropout --data --valid-data --epochs --steps --batches --batch-size --bptt --lr --clip --mode --seed --log-interval --generate --prompt --checkpoint --checkpoint-every --resume --local --rank --ranks --spawn --world-size --master-addr --master-port --listen --transport --rpc-timeout --join-timeout --peer-timeout --device --trace --threads --inject --quiet --help' ;;
    rl) options='--observers --envs-per-observer --max-steps --gamma --lr --threshold --max-episodes --seed --log-interval --checkpoint --checkpoint-every --resume --local --rank --ranks --spawn --world-size --master-addr --master-port --listen --transport --rpc-timeout --join-timeout --peer-timeout --device --trace --threads --inject --quiet --help' ;;
    pipeline) options='--model --stages --split --image-size --classes --data --weights --num-split --schedule --batches --batch-size --loss --lr --seed --log-interval --checkpoint --checkpoint-every --resume --explain --local --rank --ranks --spawn --world-size --master-addr --master-port --listen --transport --rpc-timeout --join-timeout --peer-timeout --device --trace --threads --inject --quiet --help' ;;
    help) ((COMP_CWORD == 2)) && options='hybrid ps rnn rl pipeline' ;;
    man) ((COMP_CWORD == 2)) && options='hybrid ps rnn rl pipeline' ;;
    completion) ((COMP_CWORD == 2)) && options='bash zsh fish' ;;
    schema) ((COMP_CWORD == 2)) && options='start waiting ready ddp checkpoint warn error rank_end end step epoch eval text episode split' ;;
    '') options='hybrid ps rnn rl pipeline help man completion schema --help --version' ;;
  esac
  case $command/$prev in
    hybrid/--data | rnn/--data | hybrid/--test-data | */--trace | rnn/--valid-data | pipeline/--weights)
      compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$cur"); return
      ;;
    hybrid/--optimizer)
      mapfile -t COMPREPLY < <(compgen -W 'sgd adagrad adam' -- "$cur"); return
      ;;
    hybrid/--mode | rnn/--mode)
      mapfile -t COMPREPLY < <(compgen -W 'async sync' -- "$cur"); return
      ;;
    */--checkpoint | ps/--data | pipeline/--data)
      compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$cur"); return
      ;;
    */--resume)
      compopt -o filenames; mapfile -t COMPREPLY < <(compgen -W 'auto' -- "$cur"; compgen -f -- "$cur"); return
      ;;
    */--local | */--spawn | */--quiet | */--help | ps/--verify-grads | pipeline/--explain)
      :
      ;;
    */--master-addr)
      mapfile -t COMPREPLY < <(compgen -A hostname -- "$cur"); return
      ;;
    */--transport)
      mapfile -t COMPREPLY < <(compgen -W 'auto tcp unix' -- "$cur"); return
      ;;
    */--device)
      mapfile -t COMPREPLY < <(compgen -W 'cpu cuda' -- "$cur"); return
      ;;
    ps/--dropout)
      mapfile -t COMPREPLY < <(compgen -W 'on off' -- "$cur"); return
      ;;
    ps/--mode)
      mapfile -t COMPREPLY < <(compgen -W 'async sync ssp' -- "$cur"); return
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
  esac
  mapfile -t COMPREPLY < <(compgen -W "$options" -- "$cur")
}
complete -F _distrain distrain
