;; A product of matrices, two numbers at a time. interpreter.js has the bytes of this file, as
;; `wasmtime.wat2wasm` makes them; a test compares both.
;;
;; Addresses are in bytes. `left` is a dense (rows, depth) of float64. `right` is of float32, in panels
;; of four columns, row after row, so that a tile reads it in order. `product` is a dense (rows, columns)
;; of float32. Rows and columns are multiples of 4, and the depth is at least 1.
;;
;; A tile of 4 x 4 results stays in eight registers. Sums are in float64 and go along the depth in
;; order: the results are those of the loops in interpreter.js, bit for bit, and a part that is computed
;; alone is that of the whole. Sums in float32 take half the time, but differed from JAX's by more than
;; the page's tests allow.
(module
  (memory (export "memory") 1)
  (func (export "multiply")
    (param $product i32) (param $left i32) (param $right i32)
    (param $rows i32) (param $depth i32) (param $columns i32)
    (local $row_bytes i32) (local $product_row_bytes i32)
    (local $column i32) (local $row i32) (local $steps_left i32)
    (local $a0 i32) (local $a1 i32) (local $a2 i32) (local $a3 i32)  ;; in four rows of `left`
    (local $b i32)  ;; in a panel
    (local $o i32)
    (local $a v128) (local $b01 v128) (local $b23 v128)
    (local $c0_01 v128) (local $c0_23 v128) (local $c1_01 v128) (local $c1_23 v128)
    (local $c2_01 v128) (local $c2_23 v128) (local $c3_01 v128) (local $c3_23 v128)
    (local.set $row_bytes (i32.mul (local.get $depth) (i32.const 8)))
    (local.set $product_row_bytes (i32.mul (local.get $columns) (i32.const 4)))
    (loop $panels
      (local.set $a0 (local.get $left))
      (local.set $o (i32.add (local.get $product) (i32.mul (local.get $column) (i32.const 4))))
      (local.set $row (i32.const 0))
      (loop $tiles
        (local.set $a1 (i32.add (local.get $a0) (local.get $row_bytes)))
        (local.set $a2 (i32.add (local.get $a1) (local.get $row_bytes)))
        (local.set $a3 (i32.add (local.get $a2) (local.get $row_bytes)))
        (local.set $b (local.get $right))
        (local.set $c0_01 (v128.const f64x2 0 0))
        (local.set $c0_23 (v128.const f64x2 0 0))
        (local.set $c1_01 (v128.const f64x2 0 0))
        (local.set $c1_23 (v128.const f64x2 0 0))
        (local.set $c2_01 (v128.const f64x2 0 0))
        (local.set $c2_23 (v128.const f64x2 0 0))
        (local.set $c3_01 (v128.const f64x2 0 0))
        (local.set $c3_23 (v128.const f64x2 0 0))
        (local.set $steps_left (local.get $depth))
        (loop $steps
          (local.set $b01 (f64x2.promote_low_f32x4 (v128.load64_zero (local.get $b))))
          (local.set $b23 (f64x2.promote_low_f32x4 (v128.load64_zero offset=8 (local.get $b))))
          (local.set $a (v128.load64_splat (local.get $a0)))
          (local.set $c0_01 (f64x2.add (local.get $c0_01) (f64x2.mul (local.get $a) (local.get $b01))))
          (local.set $c0_23 (f64x2.add (local.get $c0_23) (f64x2.mul (local.get $a) (local.get $b23))))
          (local.set $a (v128.load64_splat (local.get $a1)))
          (local.set $c1_01 (f64x2.add (local.get $c1_01) (f64x2.mul (local.get $a) (local.get $b01))))
          (local.set $c1_23 (f64x2.add (local.get $c1_23) (f64x2.mul (local.get $a) (local.get $b23))))
          (local.set $a (v128.load64_splat (local.get $a2)))
          (local.set $c2_01 (f64x2.add (local.get $c2_01) (f64x2.mul (local.get $a) (local.get $b01))))
          (local.set $c2_23 (f64x2.add (local.get $c2_23) (f64x2.mul (local.get $a) (local.get $b23))))
          (local.set $a (v128.load64_splat (local.get $a3)))
          (local.set $c3_01 (f64x2.add (local.get $c3_01) (f64x2.mul (local.get $a) (local.get $b01))))
          (local.set $c3_23 (f64x2.add (local.get $c3_23) (f64x2.mul (local.get $a) (local.get $b23))))
          (local.set $a0 (i32.add (local.get $a0) (i32.const 8)))
          (local.set $a1 (i32.add (local.get $a1) (i32.const 8)))
          (local.set $a2 (i32.add (local.get $a2) (i32.const 8)))
          (local.set $a3 (i32.add (local.get $a3) (i32.const 8)))
          (local.set $b (i32.add (local.get $b) (i32.const 16)))
          (local.set $steps_left (i32.sub (local.get $steps_left) (i32.const 1)))
          (br_if $steps (local.get $steps_left)))
        (v128.store64_lane 0 (local.get $o) (f32x4.demote_f64x2_zero (local.get $c0_01)))
        (v128.store64_lane offset=8 0 (local.get $o) (f32x4.demote_f64x2_zero (local.get $c0_23)))
        (local.set $o (i32.add (local.get $o) (local.get $product_row_bytes)))
        (v128.store64_lane 0 (local.get $o) (f32x4.demote_f64x2_zero (local.get $c1_01)))
        (v128.store64_lane offset=8 0 (local.get $o) (f32x4.demote_f64x2_zero (local.get $c1_23)))
        (local.set $o (i32.add (local.get $o) (local.get $product_row_bytes)))
        (v128.store64_lane 0 (local.get $o) (f32x4.demote_f64x2_zero (local.get $c2_01)))
        (v128.store64_lane offset=8 0 (local.get $o) (f32x4.demote_f64x2_zero (local.get $c2_23)))
        (local.set $o (i32.add (local.get $o) (local.get $product_row_bytes)))
        (v128.store64_lane 0 (local.get $o) (f32x4.demote_f64x2_zero (local.get $c3_01)))
        (v128.store64_lane offset=8 0 (local.get $o) (f32x4.demote_f64x2_zero (local.get $c3_23)))
        (local.set $o (i32.add (local.get $o) (local.get $product_row_bytes)))
        (local.set $a0 (local.get $a3))  ;; the end of the last row is the beginning of the next
        (local.set $row (i32.add (local.get $row) (i32.const 4)))
        (br_if $tiles (i32.lt_u (local.get $row) (local.get $rows))))
      (local.set $right (local.get $b))  ;; the end of the panel
      (local.set $column (i32.add (local.get $column) (i32.const 4)))
      (br_if $panels (i32.lt_u (local.get $column) (local.get $columns))))))
