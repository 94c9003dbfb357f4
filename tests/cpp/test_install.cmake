# SPDX-License-Identifier: Apache-2.0
#
# Installs the shared library and follows docs/cpp.md: each command that is marked there runs word for word, in a folder
# that holds the examples, with a real prefix in place of /your/prefix.
#
# cmake -D SOURCE=... -D BUILD=... -D LIBDIR=... -P test_install.cmake
set(work "${BUILD}/test_install")
set(prefix "${work}/prefix")
file(REMOVE_RECURSE "${work}")
execute_process(
  COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --component library --prefix "${prefix}"
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
foreach(file IN ITEMS include/tiledattn/tiledattn.h include/tiledattn/c_api.h share/doc/tiledattn/LICENSE
                      ${LIBDIR}/cmake/tiledattn/tiledattnConfig.cmake)
  if(NOT EXISTS "${prefix}/${file}")
    message(FATAL_ERROR "not installed: ${file}")
  endif()
endforeach()

file(COPY "${SOURCE}/examples" DESTINATION "${work}")
file(READ "${SOURCE}/docs/cpp.md" page)
foreach(name IN ITEMS "g[+][+]" gcc cmake)
  if(NOT page MATCHES "<!-- ci: ${name} -->\n```bash\n([^`]*)```")
    message(FATAL_ERROR "docs/cpp.md has no command marked <!-- ci: ${name} -->")
  endif()
  string(REPLACE "/your/prefix/lib" "/your/prefix/${LIBDIR}" command "${CMAKE_MATCH_1}")
  string(REPLACE "/your/prefix" "${prefix}" command "${command}")
  message(STATUS "${command}")
  execute_process(COMMAND bash -euc "${command}" WORKING_DIRECTORY "${work}" COMMAND_ERROR_IS_FATAL ANY)
endforeach()
