# bash completion of distrain
_distrain() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} i command= options
  local commands='hybrid ps rnn rl pipeline'
  COMPREPLY=()
  # `--option=value` comes as three words.
  if [[ $cur == '=' ]]; then
    cur=
  elif [[ $prev == '=' ]]; then
    prev=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case ${COMP_WORDS[i]} in
      hybrid | ps | rnn | rl | pipeline)
        command=${COMP_WORDS[i]}
        break
        ;;
      help)
        mapfile -t COMPREPLY < <(compgen -W "$commands" -- "$cur")
        return
        ;;
    esac
  done
  case $command in
    hybrid) options='
      --trainers --num-embeddings --embedding-dim --classes --data --test-data
      --epochs --steps --batches --batch-size --optimizer --mode' ;;
    ps) options='
      --trainers --limit --dropout --num-gpus --mean --std --data
      --epochs --steps --batch-size --mode --staleness --verify-grads' ;;
    rnn) options='
      --trainers --vocab-size --emsize --nhid --nlayers --dropout --data --valid-data
      --epochs --steps --batches --batch-size --bptt --clip --mode --generate --prompt' ;;
    rl) options='
      --observers --envs-per-observer --max-steps --gamma --threshold --max-episodes' ;;
    pipeline) options='
      --model --stages --split --image-size --classes --data --weights
      --num-split --schedule --batches --batch-size --loss --explain' ;;
    *)
      mapfile -t COMPREPLY < <(compgen -W "$commands help --help --version" -- "$cur")
      return
      ;;
  esac
  # What all of them have.
  options+='
    --lr --seed --log-interval
    --checkpoint --checkpoint-every --resume
    --local --rank --ranks --spawn --world-size --master-addr --master-port
    --listen --transport --rpc-timeout --join-timeout --peer-timeout
    --device --trace --threads --inject --quiet --help'
  case $command/$prev in
    */--data | */--test-data | */--valid-data | */--weights | */--checkpoint | */--trace)
      compopt -o filenames
      mapfile -t COMPREPLY < <(compgen -f -- "$cur")
      return
      ;;
    */--resume)
      compopt -o filenames
      mapfile -t COMPREPLY < <(compgen -W auto -- "$cur"; compgen -f -- "$cur")
      return
      ;;
    */--model) mapfile -t COMPREPLY < <(compgen -W 'resnet50 resnet18' -- "$cur"); return ;;
    */--schedule) mapfile -t COMPREPLY < <(compgen -W 'gpipe 1f1b naive' -- "$cur"); return ;;
    */--device) mapfile -t COMPREPLY < <(compgen -W 'cpu cuda' -- "$cur"); return ;;
    */--loss) mapfile -t COMPREPLY < <(compgen -W 'mse ce' -- "$cur"); return ;;
    */--optimizer) mapfile -t COMPREPLY < <(compgen -W 'sgd adagrad adam' -- "$cur"); return ;;
    ps/--mode) mapfile -t COMPREPLY < <(compgen -W 'async sync ssp' -- "$cur"); return ;;
    */--mode) mapfile -t COMPREPLY < <(compgen -W 'async sync' -- "$cur"); return ;;
    ps/--dropout) mapfile -t COMPREPLY < <(compgen -W 'on off' -- "$cur"); return ;;
    */--transport) mapfile -t COMPREPLY < <(compgen -W 'auto tcp unix' -- "$cur"); return ;;
    */--master-addr)
      mapfile -t COMPREPLY < <(compgen -A hostname -- "$cur")
      return
      ;;
    */--verify-grads | */--explain | */--local | */--spawn | */--quiet | */--help) ;;
    */--*) return ;; # numbers and text
  esac
  mapfile -t COMPREPLY < <(compgen -W "$options" -- "$cur")
}
complete -F _distrain distrain
