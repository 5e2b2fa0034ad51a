# Imports LibTorch from the folder `torch_root`, for the build and for the installed package. The targets for
# torch_cpu and c10 are our own, because find_package(Torch) requires CUDA.

# Sets `lacking` to the problem with this LibTorch, empty if there is none, and sets `torch_version`.
function(distrain_check_torch lacking)
  set(${lacking} "" PARENT_SCOPE)
  set(torch_version "" PARENT_SCOPE)
  foreach(file IN ITEMS include/torch/headeronly/version.h lib/libtorch_cpu.so lib/libc10.so)
    if(NOT EXISTS ${torch_root}/${file})
      set(${lacking} "No LibTorch in ${torch_root}: there is no ${file}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  file(READ ${torch_root}/include/torch/headeronly/version.h header)
  string(REGEX MATCH "TORCH_VERSION[ \\\n]+\"([^\"]+)\"" found "${header}")
  set(torch_version "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

function(distrain_import_torch)
  if(TARGET distrain_torch)
    return()
  endif()
  add_library(distrain_c10 SHARED IMPORTED GLOBAL)
  set_target_properties(distrain_c10 PROPERTIES IMPORTED_LOCATION ${torch_root}/lib/libc10.so)
  add_library(distrain_torch SHARED IMPORTED GLOBAL)
  set_target_properties(
    distrain_torch
    PROPERTIES IMPORTED_LOCATION ${torch_root}/lib/libtorch_cpu.so
               IMPORTED_LINK_INTERFACE_LIBRARIES "distrain_c10;Threads::Threads"
               INTERFACE_COMPILE_DEFINITIONS _GLIBCXX_USE_CXX11_ABI=1)
  target_include_directories(
    distrain_torch SYSTEM INTERFACE ${torch_root}/include
                                    ${torch_root}/include/torch/csrc/api/include)
  # libtorch_cpu finds libcudart and libcupti by its RPATH; the linker needs their folders.
  file(GLOB torch_needed_dirs ${torch_root}/../nvidia/cu*/lib)
  foreach(dir IN LISTS torch_needed_dirs)
    target_link_options(distrain_torch INTERFACE -Wl,-rpath-link,${dir})
  endforeach()
endfunction()
