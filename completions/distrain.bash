# bash completion of distrain
_distrain() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} i command=
  COMPREPLY=()
  # `--option=value` comes as three words.
  if [[ $cur == '=' ]]; then
    cur=
  elif [[ $prev == '=' ]]; then
    prev=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case ${COMP_WORDS[i]} in
      hybrid) command=hybrid ;;
      help)
        mapfile -t COMPREPLY < <(compgen -W 'hybrid' -- "$cur")
        return
        ;;
    esac
  done
  if [[ -z $command ]]; then
    mapfile -t COMPREPLY < <(compgen -W 'hybrid help --help --version' -- "$cur")
    return
  fi
  case $prev in
    --data | --test-data)
      compopt -o filenames
      mapfile -t COMPREPLY < <(compgen -f -- "$cur")
      return
      ;;
    --optimizer) mapfile -t COMPREPLY < <(compgen -W 'sgd adagrad adam' -- "$cur"); return ;;
    --mode) mapfile -t COMPREPLY < <(compgen -W 'async sync' -- "$cur"); return ;;
    --transport) mapfile -t COMPREPLY < <(compgen -W 'auto tcp unix' -- "$cur"); return ;;
    --master-addr)
      mapfile -t COMPREPLY < <(compgen -A hostname -- "$cur")
      return
      ;;
    --trainers | --num-embeddings | --embedding-dim | --classes | --epochs | --batches | \
      --batch-size | --lr | --seed | --log-interval | --rank | --ranks | --world-size | \
      --master-port | --listen | --rpc-timeout | --join-timeout | --peer-timeout | --threads)
      return
      ;;
  esac
  mapfile -t COMPREPLY < <(compgen -W '
    --trainers --num-embeddings --embedding-dim --classes --data --test-data
    --epochs --batches --batch-size --lr --optimizer --mode --seed --log-interval
    --local --rank --ranks --spawn --world-size --master-addr --master-port
    --listen --transport --rpc-timeout --join-timeout --peer-timeout
    --threads --quiet --help' -- "$cur")
}
complete -F _distrain distrain
