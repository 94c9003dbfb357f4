# SPDX-License-Identifier: Apache-2.0
#
# The extension module tiledattn._core and its stub. pip builds install it beside the Python files; a plain
# `cmake --install <build> --component python --prefix <folder>` makes an importable package in <folder>.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
if(NOT SKBUILD AND NOT nanobind_DIR)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
    OUTPUT_VARIABLE nanobind_DIR OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${Python_EXECUTABLE} has no nanobind: pip install nanobind nanobind-backend")
  endif()
endif()
find_package(nanobind 3.1 CONFIG REQUIRED)

if(TILEDATTN_NANOBIND_SPLIT)
  nanobind_add_module(_core BACKEND_MODULE nanobind_backend ${tiledattn_python_sources})
else()
  nanobind_add_module(_core NB_STATIC ${tiledattn_python_sources})
endif()
target_include_directories(_core PRIVATE src/cpp src/cpp/python)
target_link_libraries(_core PRIVATE tiledattn_core)
target_compile_definitions(_core PRIVATE TILEDATTN_VERSION="${TILEDATTN_VERSION_TEXT}")
tiledattn_set_warnings(_core)
install(TARGETS _core LIBRARY DESTINATION tiledattn COMPONENT python)

# Writing the stub imports the module, which a cross-compiled or sanitized one does not allow.
if(NOT CMAKE_CROSSCOMPILING AND NOT TILEDATTN_SANITIZE)
  nanobind_add_stub(
    _core_stub
    MODULE _core
    OUTPUT _core.pyi
    PYTHON_PATH $<TARGET_FILE_DIR:_core>
    DEPENDS _core)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/_core.pyi DESTINATION tiledattn COMPONENT python)
endif()

if(NOT SKBUILD)
  install(
    DIRECTORY python/tiledattn
    DESTINATION .
    COMPONENT python
    FILES_MATCHING
    PATTERN "*.py"
    PATTERN "py.typed"
    PATTERN "__pycache__" EXCLUDE)
endif()
