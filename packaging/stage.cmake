# cpack runs this file between installing into its own folder and packing that folder. The packages are for other
# machines, so this file removes the path of the build's LibTorch, and for a .deb it follows Debian's rules for files.
set(root ${CPACK_TEMPORARY_INSTALL_DIRECTORY})
if(CPACK_GENERATOR STREQUAL "DEB")
  string(APPEND root ${CPACK_PACKAGING_INSTALL_PREFIX})
endif()
set(everybody OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)

file(GLOB_RECURSE programs LIST_DIRECTORIES OFF ${root}/lib*/*.so* ${root}/libexec/*)
foreach(program IN LISTS programs)
  if(NOT IS_SYMLINK ${program})
    file(RPATH_REMOVE FILE ${program})
  endif()
endforeach()
foreach(file bin/distrain ${CPACK_DISTRAIN_CONFIG})
  cmake_path(GET file FILENAME name)
  file(COPY_FILE ${CPACK_DISTRAIN_FILES}/${name} ${root}/${file})
endforeach()
file(CHMOD ${root}/bin/distrain PERMISSIONS ${everybody})
file(CHMOD ${root}/${CPACK_DISTRAIN_CONFIG} PERMISSIONS OWNER_READ OWNER_WRITE GROUP_READ WORLD_READ)

if(CPACK_GENERATOR STREQUAL "DEB")
  file(GLOB pages ${root}/share/man/man1/*.1)
  execute_process(COMMAND gzip -9n ${pages} COMMAND_ERROR_IS_FATAL ANY)
  file(MAKE_DIRECTORY ${root}/share/zsh/vendor-completions)
  file(RENAME ${root}/share/zsh/site-functions/_distrain ${root}/share/zsh/vendor-completions/_distrain)
  file(REMOVE_RECURSE ${root}/share/zsh/site-functions)
endif()
file(CHMOD_RECURSE ${root} DIRECTORY_PERMISSIONS ${everybody})  # whatever the umask is
