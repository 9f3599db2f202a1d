# The Debian packages: cpack makes one of each install component, for the prefix /usr (preset release). tools/packages does it all.
# Invariant: what a program links is found by dpkg-shlibdeps; only what it calls by name is written here.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME kvq)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(KVQ_PACKAGE_CONTACT "kvq maintainers <kvq@localhost>" CACHE STRING "who answers for the Debian packages")
set(CPACK_PACKAGE_CONTACT ${KVQ_PACKAGE_CONTACT})
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_SOURCE_DIR}/build/packages)
set(CPACK_STRIP_FILES ON)
set(CPACK_THREADS 0)
set(CPACK_COMPONENTS_ALL kvqd kvqctl libkvq1 libkvq-dev python3-kvqd)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_SOURCE_DIR}/cmake/debian_documents.cmake)
set(CPACK_KVQ_SOURCE_DIR ${CMAKE_SOURCE_DIR})  # for that script

# One package: its name, section and description. Its maintainer scripts are in cmake/debian/NAME.
function(kvq_package name section text)
  string(TOUPPER ${name} upper)
  file(GLOB control ${CMAKE_SOURCE_DIR}/cmake/debian/${name}/*)
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${name} PARENT_SCOPE)
  set(CPACK_DEBIAN_${upper}_PACKAGE_SECTION ${section} PARENT_SCOPE)
  set(CPACK_DEBIAN_${upper}_PACKAGE_CONTROL_EXTRA "${control}" PARENT_SCOPE)
  set(CPACK_DEBIAN_${upper}_DESCRIPTION "${text}" PARENT_SCOPE)
endfunction()

set(kvq_about "kvq is a memory manager for the KV cache of language models. Model servers
of one node map the pages of one daemon and share a prefix's K and V; when
memory gets short the daemon rewrites cold pages from 16 bits to INT4 while
they are in use.
.")
kvq_package(kvqd admin "memory manager for the KV cache of language models, daemon
${kvq_about}
This package has the daemon with its systemd units, and kvq-hold, which keeps
the daemon's memory over its death where no systemd does.")
kvq_package(kvqctl admin "memory manager for the KV cache of language models, tool
${kvq_about}
This package has kvqctl, which shows a running daemon live, tunes it, and
looks for what is wrong with the machine.")
kvq_package(libkvq1 libs "memory manager for the KV cache of language models, library
${kvq_about}
This package has the library that model servers link. It carries its own
third-party code and shows nothing of it.")
kvq_package(libkvq-dev libdevel "memory manager for the KV cache of language models, headers
${kvq_about}
This package has the headers for C and C++, and what CMake's find_package(kvq)
and pkg-config need.")
kvq_package(python3-kvqd python "memory manager for the KV cache of language models, Python
${kvq_about}
This package has the Python module kvqd: numpy arrays, and tensors of torch or
of whatever speaks DLPack, over libkvq.")

# The user and /run/kvq are made by systemd's tools, whether systemd runs or not.
set(CPACK_DEBIAN_KVQD_PACKAGE_DEPENDS "systemd | systemd-standalone-sysusers, systemd | systemd-standalone-tmpfiles")
set(CPACK_DEBIAN_KVQD_PACKAGE_RECOMMENDS kvqctl)
set(CPACK_DEBIAN_KVQD_PACKAGE_SUGGESTS "libcuda1, prometheus")
set(CPACK_DEBIAN_KVQCTL_PACKAGE_ENHANCES kvqd)
set(CPACK_DEBIAN_LIBKVQ1_PACKAGE_SUGGESTS "kvqd, libcuda1")
set(CPACK_DEBIAN_LIBKVQ-DEV_PACKAGE_DEPENDS "libkvq1 (= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_PYTHON3-KVQD_PACKAGE_DEPENDS "libkvq1 (= ${PROJECT_VERSION}), python3 (>= 3.10), python3-cffi, python3-numpy")
set(CPACK_DEBIAN_PYTHON3-KVQD_PACKAGE_ARCHITECTURE all)
include(CPack)
