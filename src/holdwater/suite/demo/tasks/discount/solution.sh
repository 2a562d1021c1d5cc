sed -i 's/if basket.member or .*/if basket.member and basket.worth() >= THRESHOLD and basket.coupon is None:/' shop/discount.py
