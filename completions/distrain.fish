# fish completion of distrain
complete -c distrain -f
complete -c distrain -n __fish_use_subcommand -a hybrid -d 'Embeddings on a server, dense layers under DDP'
complete -c distrain -n __fish_use_subcommand -a help -d 'How to use a command'
complete -c distrain -n __fish_use_subcommand -l version -d 'Versions of distrain and LibTorch'
complete -c distrain -s h -l help -d 'Summary of commands or options'
complete -c distrain -n '__fish_seen_subcommand_from help' -a hybrid

function __distrain_hybrid
    complete -c distrain -n '__fish_seen_subcommand_from hybrid' $argv
end
__distrain_hybrid -x -l trainers -d 'Trainers; the job has two ranks more'
__distrain_hybrid -x -l num-embeddings -d 'Rows of the embedding table'
__distrain_hybrid -x -l embedding-dim -d 'Numbers in a row'
__distrain_hybrid -x -l classes -d 'Number of classes'
__distrain_hybrid -r -F -l data -d 'Train on text in fastText format'
__distrain_hybrid -r -F -l test-data -d 'Evaluate on this file after training'
__distrain_hybrid -x -l epochs -d 'Passes over the data'
__distrain_hybrid -x -l batches -d 'Batches an epoch and trainer, random data only'
__distrain_hybrid -x -l batch-size -d 'Examples a batch and trainer'
__distrain_hybrid -x -l lr -d 'Learning rate'
__distrain_hybrid -x -l optimizer -a 'sgd adagrad adam' -d 'Optimizer of all parameters'
__distrain_hybrid -x -l mode -a 'async sync' -d 'How the trainers update the table'
__distrain_hybrid -x -l seed -d 'Of parameters, data and shuffling'
__distrain_hybrid -x -l log-interval -d 'Steps between step lines'
__distrain_hybrid -l local -d 'The whole job in this process, without RPC'
__distrain_hybrid -x -l rank -d 'Be this one rank of a job'
__distrain_hybrid -x -l ranks -d 'Start these ranks here'
__distrain_hybrid -l spawn -d 'Start every rank here, whatever the environment says'
__distrain_hybrid -x -l world-size -d 'Number of ranks'
__distrain_hybrid -x -l master-addr -a '(__fish_print_hostnames)' -d 'Host of rank 0'
__distrain_hybrid -x -l master-port -d 'Port of rank 0'
__distrain_hybrid -x -l listen -d 'Address to listen on'
__distrain_hybrid -x -l transport -a 'auto tcp unix' -d 'Between ranks'
__distrain_hybrid -x -l rpc-timeout -d 'Deadline of one remote call, seconds'
__distrain_hybrid -x -l join-timeout -d 'How long to wait for all ranks, seconds'
__distrain_hybrid -x -l peer-timeout -d 'Silence after which a rank counts as lost, seconds'
__distrain_hybrid -x -l threads -d 'Threads of one operation'
__distrain_hybrid -s q -l quiet -d 'No progress display'
functions -e __distrain_hybrid
