base=$1; fabric=$2; shift 2; umask 077
case $base in /*) ;; "~/"*) base=$HOME/${base#??} ;; *) base=$HOME/$base ;; esac
units=$base/units/$fabric
#@prelude@
