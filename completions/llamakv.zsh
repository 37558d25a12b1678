#compdef llamakv

_llamakv_completion() {
  eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _LLAMAKV_COMPLETE=complete_zsh llamakv)
}

compdef _llamakv_completion llamakv
