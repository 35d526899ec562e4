# find_package(kvstored): the target kvstored::client, wherever the files were put.
include("${CMAKE_CURRENT_LIST_DIR}/kvstoredTargets.cmake")
